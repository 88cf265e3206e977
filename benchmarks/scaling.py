"""How the service's cost grows: completions a second and CPU for each, over what may become large.

What always holds: one thing grows in a sweep and the load stays the same: the engine's latency is chosen so that the
asked rate does not depend on what grows, and stays well below what one core can do. So the CPU for one completion is
comparable along a sweep: where it rises, something costs more than in proportion.

    python -m benchmarks.scaling [--rounds 3] [--only in_flight ...] [--window 8] [--folder benchmarks/plots]

Prints a table for each sweep with the growth of CPU for one completion as an exponent (0: it does not depend on what
grows; 1: in proportion to it), keeps the figures in plots/scaling.json, and draws plots/scaling.png when every sweep is
there. A sweep that is run again takes its own place only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import httpx

from benchmarks import plots
from benchmarks.load import PROMPTS_FILE, REWARDS, prompts, rows
from benchmarks.processes import (
    ENGINE_CORE,
    folder,
    lean_engine,
    module,
    output,
    resident_bytes,
    service,
)

CONFIG = """
[[engines]]
url = "{engine}"
max_inflight = 16384
[prompts]
path = "{prompts}"
epochs = 0
[groups]
num_generations = {group}
max_ready_groups = 4096
max_pending_groups = 200000
[dispatch]
max_inflight_rollouts = {in_flight}
[sampling]
max_tokens = {tokens}
[[rewards]]
name = "brevity"
function = "bench_rewards:brevity"
[store]
url = "sqlite:///bench.db"
max_lease_bytes = {lease_bytes}
"""
RATE, TOKEN_RATE = 400.0, 400_000.0
"""Completions, and tokens, a second that are asked for: under half of what one core of a small machine can do."""
IN_FLIGHT, GROUP, TOKENS = 1024, 8, 64
LEASE_BYTES = 32 * 2**20
"""Of a long completion's leases, so that the trainer beside the engine is not what limits."""
SPARE_GROUPS = 3000
"""More than a run takes while so many are to stay outstanding."""
CHUNK = 1000
NOISE = 0.15
"""An exponent that the machine's noise alone can make, over a growth of 30."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One point of a sweep."""

    in_flight: int = IN_FLIGHT
    group: int = GROUP
    tokens: int = TOKENS
    outstanding: int = 0
    """Groups that wait; 0: as many as the service reads ahead from a file."""

    @property
    def rate(self) -> float:
        return min(RATE, TOKEN_RATE / self.tokens)

    @property
    def latency_s(self) -> float:
        return self.in_flight / self.rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What grows, and how CPU for one completion may grow with it."""

    title: str
    loads: Mapping[int, Load]
    allowed: float
    """Exponent: 0 where one completion should cost the same, 1 where it is what becomes larger."""


SWEEPS: Mapping[str, Sweep] = {
    "in_flight": Sweep(
        title="rollouts in flight",
        loads={n: Load(in_flight=n) for n in (256, 512, 1024, 2048, 4096, 8192)},
        allowed=0.0,
    ),
    "group_size": Sweep(
        title="rollouts of a group", loads={n: Load(group=n) for n in (2, 4, 8, 16, 32, 64)}, allowed=0.0
    ),
    "length": Sweep(
        title="tokens of a completion",
        loads={n: Load(tokens=n, in_flight=64) for n in (64, 256, 1024, 4096, 16384, 32768)},
        allowed=1.0,
    ),
    "outstanding": Sweep(
        title="groups outstanding",
        loads={n: Load(outstanding=n) for n in (1000, 3000, 10_000, 30_000, 100_000)},
        allowed=0.0,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One run."""

    per_s: float
    """Completions a second whose ack was answered."""
    cpu_ms: float
    """Of the service's process, for one completion."""
    helpers_cpu_ms: float
    """Of its reward workers."""
    lag_p99_ms: float
    """How late the service's event loop woke a sleeper."""
    resident: int
    """Bytes of the service's process at the end."""


TRAINER_SAYS = ("per_s", "cpu_ms", "helpers_cpu_ms", "lag_p99_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One point of a sweep, with the medians of its runs."""

    x: int
    asked_per_s: float
    median: Seen


def run(load: Load, window_s: float) -> Seen:
    """One service under one load."""
    waiting = load.outstanding > 0
    with (
        folder() as place,
        lean_engine(load.latency_s, tokens=load.tokens, stagger=load.in_flight) as engine_url,
    ):
        config = CONFIG.format(
            engine=engine_url,
            prompts="" if waiting else PROMPTS_FILE,
            group=load.group,
            in_flight=load.in_flight,
            tokens=load.tokens,
            lease_bytes=LEASE_BYTES,
        )
        files = {"bench_rewards.py": REWARDS} | ({} if waiting else {PROMPTS_FILE: prompts(2000)})
        with service(config, files, within=place) as running:
            if waiting:
                _submit(running.url, load.outstanding + SPARE_GROUPS)
            warm_up_s = 2.0 + 1.2 * load.latency_s
            window_s = max(window_s, 2 * load.latency_s)  # whole waves, where rollouts that began together still do
            min_groups = max(1, min(16, int(load.rate / load.group / 8)))
            times = (warm_up_s, window_s, min_groups, load.in_flight)
            trainer = module("benchmarks.trainer", running.url, running.pid, *times)
            seen = json.loads(output(trainer, ENGINE_CORE))
            return Seen(**{name: seen[name] for name in TRAINER_SAYS}, resident=resident_bytes(running.pid))


def _submit(url: str, count: int) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        for first in range(0, count, CHUNK):
            http.post("/prompts", json={"prompts": rows(first, min(CHUNK, count - first))}).raise_for_status()


def measure(sweep: Sweep, rounds: int, window_s: float, say: Callable[[str], None]) -> list[Found]:
    """Every point once a round, so that a noisy moment does not fall on one point alone."""
    runs: dict[int, list[Seen]] = {x: [] for x in sweep.loads}
    for number in range(rounds):
        for x, load in sweep.loads.items():
            runs[x].append(run(load, window_s))
            say(f"round {number + 1} of {rounds}, {x} {sweep.title}: {runs[x][-1]}")
    return [Found(x=x, asked_per_s=sweep.loads[x].rate, median=_median(seen)) for x, seen in runs.items()]


def _median(seen: Sequence[Seen]) -> Seen:
    """Field by field."""
    return Seen(**{f.name: statistics.median(getattr(one, f.name) for one in seen) for f in fields(Seen)})


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through (log x, log y), by least squares. ValueError with fewer than two points."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression([x for x, _ in logs], [y for _, y in logs]).slope


def growth(found: Sequence[Found]) -> float:
    """Exponent over the upper half of a sweep, where what is the same for every completion matters least."""
    return exponent([(point.x, point.median.cpu_ms) for point in found[-(len(found) // 2 + 1) :]])


def table(sweep: Sweep, found: Sequence[Found]) -> str:
    lines = [
        f"| {sweep.title} | asked/s | completions/s | CPU ms each | reward workers | loop lag p99 | resident MiB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [_row(point) for point in found]
    slope = growth(found)
    words = "FASTER THAN IN PROPORTION" if slope > sweep.allowed + NOISE else "not faster than in proportion"
    lines.append(f"\nCPU of one completion grows as x^{slope:.2f} (allowed: {sweep.allowed:g}): {words}")
    return "\n".join(lines)


def _row(point: Found) -> str:
    seen = point.median
    return (
        f"| {point.x:,} | {point.asked_per_s:.0f} | {seen.per_s:.0f} | {seen.cpu_ms:.3f} | {seen.helpers_cpu_ms:.3f}"
        f" | {seen.lag_p99_ms:.1f} ms | {seen.resident / 2**20:.0f} |"
    )


def draw(results: Mapping[str, Sequence[Found]], folder: Path = plots.FOLDER) -> Path:
    """CPU for one completion above, the rate reached below; a column a sweep."""
    figure, axes = plots.grid(2, len(SWEEPS), width=3.5, height=2.5)
    for column, name in enumerate(SWEEPS):
        found = results[name]
        xs = [point.x for point in found]
        upper, lower = axes[0][column], axes[1][column]
        upper.plot(xs, [point.median.cpu_ms for point in found], "o-", color=plots.BLUE, markersize=4, label="service")
        helpers = [point.median.helpers_cpu_ms for point in found]
        upper.plot(xs, helpers, "s--", color=plots.ORANGE, markersize=3.5, label="reward workers")
        lower.plot(
            xs, [point.asked_per_s for point in found], "-", color=plots.GREY, linewidth=4, alpha=0.5, label="asked"
        )
        lower.plot(xs, [point.median.per_s for point in found], "o-", color=plots.BLUE, markersize=4, label="reached")
        for axis in (upper, lower):
            axis.set_xscale("log", base=2 if name != "outstanding" else 10)
            axis.set_xticks(
                xs, [f"{x // 1000}k" if x % 1000 == 0 else f"{x // 1024}k" if x % 1024 == 0 else str(x) for x in xs]
            )
            axis.minorticks_off()
        if SWEEPS[name].allowed:
            upper.set_yscale("log")
            lower.set_yscale("log")
        else:
            upper.set_ylim(0, 1.25 * max(point.median.cpu_ms for point in found))
            lower.set_ylim(0, 1.25 * RATE)
        upper.set_title(SWEEPS[name].title, fontsize=10.5, color=plots.INK)
    axes[0][0].set_ylabel("CPU of one completion, ms", fontsize=9.5)
    axes[1][0].set_ylabel("completions/s", fontsize=9.5)
    axes[0][0].legend(frameon=False, fontsize=9)
    axes[1][0].legend(frameon=False, fontsize=9, loc="lower left")
    return plots.save(figure, "scaling", folder)


def read(folder: Path) -> dict[str, list[Found]]:
    """What `write` left there; nothing where it never did."""
    path = folder / "scaling.json"
    facts = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: [Found(x=p["x"], asked_per_s=p["asked_per_s"], median=Seen(**p["median"])) for p in points]
        for name, points in facts.items()
        if name in SWEEPS
    }


def write(results: Mapping[str, Sequence[Found]], folder: Path) -> Path:
    """The figures, a point a line, sweeps in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scaling.json"
    parts = []
    for name in SWEEPS:
        if name in results:
            points = ",\n".join(json.dumps(asdict(point)) for point in results[name])
            parts.append(f"{json.dumps(name)}: [\n{points}\n]")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    return path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--window", type=float, default=8.0, help="seconds of one run at least, beside its warm-up")
    arguments.add_argument("--only", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    arguments.add_argument("--folder", type=Path, default=plots.FOLDER, help="for scaling.json and scaling.png")
    given = arguments.parse_args()
    if given.rounds < 1:
        arguments.error(f"--rounds {given.rounds}: at least 1")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {given.rounds} rounds\n")
    results = read(given.folder)
    for name in given.only:
        found = measure(SWEEPS[name], given.rounds, given.window, lambda text: print(text, flush=True))
        print(f"\n{table(SWEEPS[name], found)}\n", flush=True)
        results[name] = found
        write(results, given.folder)
    if set(results) == set(SWEEPS):  # a picture of a part would lack columns
        print(draw(results, given.folder))


if __name__ == "__main__":
    main()
