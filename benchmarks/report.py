"""What a benchmark found, as one value, one table and one file.

A figure is the median of its runs; the runs stay beside it, so that a reader sees the spread. `reached` is computed
from the value and the goal and never written by hand. A figure that could not be measured is left out, with the reason
in the run's output: no value stands in for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import textwrap
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Protocol, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench.json"
QUICK_RESULT = ROOT / "bench-quick.json"
VERSIONS_OF = ("rollout-service", "aiohttp", "uvloop", "httpx", "msgspec", "uvicorn", "httptools", "trl")
"""The distributions a reader needs to know to compare two tables."""

Found = TypeVar("Found")


class Side(StrEnum):
    """On which side of its bound a value is good."""

    AT_LEAST = "≥"
    """The bound itself is good."""
    AT_MOST = "≤"
    """The bound itself is good."""
    BELOW = "<"
    """The bound itself is not good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound for a figure, in the figure's unit."""

    side: Side
    bound: float

    def reached(self, value: float) -> bool:
        """False for NaN, whatever the side."""
        if self.side is Side.AT_LEAST:
            return value >= self.bound
        return value <= self.bound if self.side is Side.AT_MOST else value < self.bound


def at_least(bound: float) -> Goal:
    return Goal(side=Side.AT_LEAST, bound=bound)


def at_most(bound: float) -> Goal:
    return Goal(side=Side.AT_MOST, bound=bound)


def below(bound: float) -> Goal:
    return Goal(side=Side.BELOW, bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table, one key of bench.json."""

    key: str
    """The name in bench.json."""
    what: str
    """What was measured, for the table's first column."""
    value: float
    """The median, in `unit`."""
    unit: str = ""
    """"ms", "s", "bytes", "/s", "%" (the value is then a share, shown times 100) or "x" for a ratio."""
    beside: str = ""
    """What stands beside it: who, and their figure with its unit."""
    goal: Goal | None = None
    """None: reported, without a goal."""
    runs: tuple[float, ...] = ()
    """The single runs behind the value, in the order they ran."""
    note: str = ""
    """What the reader must know to read it: what was left out, or why the goal was not reached."""

    @property
    def reached(self) -> bool | None:
        """None without a goal."""
        return None if self.goal is None else self.goal.reached(self.value)


class Bench(Protocol):
    """A module of this package that measures something."""

    def measure(self, rounds: int, *, quick: bool) -> list[Figure]:
        """Measures with `rounds` alternating runs; `quick` shortens windows and sizes, to see that it works.

        Raises whatever hinders it; the caller says so and goes on with the next benchmark.
        """


def alternate(rounds: int, ways: Mapping[str, Callable[[], Found]]) -> dict[str, list[Found]]:
    """Runs every way once a round, in turn, so that a noisy machine is noisy for all; every second round backwards,
    so that no way always follows the same one. A line of progress for each run goes to stderr."""
    found: dict[str, list[Found]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else reversed(list(ways)):
            found[name].append(ways[name]())
            say(f"  round {number + 1} of {rounds}, {name}: {found[name][-1]}")
    return found


def say(text: str) -> None:
    """A line of progress, on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def machine() -> dict[str, str | float]:
    """What the figures were measured on. `python_loop_us`: a sum of 1,000 numbers; an interpreter that was built
    without optimizations takes three times as long, and so does everything here."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, str | float] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "python_loop_us": round(_loop_us(), 1),
    }
    for name in VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _loop_us() -> float:
    return min(timeit.repeat(lambda: sum(range(1000)), number=200, repeat=5)) / 200 * 1e6


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux: what Python knows
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def shown(value: float, unit: str) -> str:
    """A value with its unit, three significant digits and more."""
    if unit == "%":
        return f"{100 * value:.2f} %"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}{unit if unit == '/s' else ' ' + unit}".rstrip()


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table, notes below it by number."""
    rows = [("what", "ours", "beside", "goal", "reached")]
    notes: list[str] = []
    for figure in figures:
        what = figure.what
        if figure.note:
            if figure.note not in notes:
                notes.append(figure.note)
            what += f" [{notes.index(figure.note) + 1}]"
        goal = "" if figure.goal is None else f"{figure.goal.side} {shown(figure.goal.bound, figure.unit)}"
        reached = {None: "", True: "yes", False: "NO"}[figure.reached]
        rows.append((what, shown(figure.value, figure.unit), figure.beside, goal, reached))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    for number, note in enumerate(notes, 1):
        lines += textwrap.wrap(f"[{number}] {note}", 118, subsequent_indent="    ")
    return "\n".join(lines)


def write(figures: Sequence[Figure], path: Path = RESULT, *, rounds: int, quick: bool) -> None:
    """Adds the figures to `path`: every key with its value, and under "runs" the runs, under "machine" the machine.

    Keys that are already there and were not measured now stay: a part of the benchmarks can be run alone.
    """
    known = json.loads(path.read_text()) if path.exists() else {}
    runs = known.get("runs", {}) | {figure.key: list(figure.runs) for figure in figures}
    unreached = {key for key in known.get("unreached", []) if key not in {figure.key for figure in figures}}
    unreached |= {figure.key for figure in figures if figure.reached is False}
    content = known | {figure.key: figure.value for figure in figures}
    content |= {"runs": runs, "unreached": sorted(unreached), "machine": machine()}
    content |= {"rounds": rounds, "quick": quick}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def arguments(description: str) -> argparse.ArgumentParser:
    """--rounds, --quick and --output, the same for every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=_positive, default=None, help="alternating runs (default 5; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="short windows: to see that it works, not to measure")
    parser.add_argument(
        "--output", type=Path, default=QUICK_RESULT if "--quick" in sys.argv else RESULT, help="the JSON file to add to"
    )
    return parser


def rounds_of(given: argparse.Namespace) -> int:
    rounds: int = given.rounds or (1 if given.quick else 5)
    return rounds


def run_alone(bench: Callable[..., list[Figure]], description: str) -> None:
    """The main function of one benchmark's module: `run_alone(measure, "what it measures")`."""
    given = arguments(description).parse_args()
    rounds = rounds_of(given)
    figures = bench(rounds, quick=given.quick)
    write(figures, given.output, rounds=rounds, quick=given.quick)
    print(table(figures))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return number
