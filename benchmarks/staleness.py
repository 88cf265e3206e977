"""What staleness costs: trained and wasted tokens over max_staleness 0 to 8, with the service's own scheduler.

What always holds: the figures are of virtual time, so that they are the same on every machine; a row of the table, of
plots/staleness.json and of the picture are the same run.

    python -m benchmarks.staleness [--window 2700] [--folder benchmarks/plots]
    python -m benchmarks.staleness --check [--admission slots|pace] [--max-staleness 2]

The first simulates every combination of `on_stale` (drop, requeue), `admission` (slots, pace) and a trainer that is
quick, level with the engine, or slow (four minutes), prints the table, and writes the figures and the picture. The
second runs one of them over HTTP, on the real service and a simulated engine, and prints it beside the simulation.
docs/staleness.md says what follows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import plots
from benchmarks.staleness_world import Setting, Tally, simulate
from rollout_service.core.group import OnStale
from rollout_service.core.scheduler import Admission

STALENESS = range(9)
TRAINERS: Mapping[str, float] = {"quick": 9.0, "level": 18.0, "slow": 36.0}
"""Seconds a step. The full engine decodes the 128 completions of a step in 18.4 s."""
WARM_UP_S, WINDOW_S = 900.0, 2700.0
"""The warm-up is longer than the longest completion and the deepest queue take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run. Shares are 0 to 1."""

    trainer: str
    admission: str
    on_stale: str
    max_staleness: int
    trained_tokens_per_s: float
    wasted_share: float
    """Of all tokens decoded."""
    mean_staleness: float
    """Of the groups that steps were made of."""
    prompts_lost_share: float
    """Of the groups that ended: stale, never trained."""
    length_share: float
    """Mean length of trained completions over that of those asked for."""
    trainer_idle_share: float
    slots_busy_share: float
    steps: int


def row(trainer: str, setting: Setting, tally: Tally) -> Row:
    return Row(
        trainer=trainer,
        admission=str(setting.admission),
        on_stale=str(setting.on_stale),
        max_staleness=setting.max_staleness,
        trained_tokens_per_s=round(tally.trained_per_s, 1),
        wasted_share=round(tally.wasted_share, 4),
        mean_staleness=round(tally.mean_staleness, 3),
        prompts_lost_share=round(tally.lost / max(1, tally.lost + tally.groups), 4),
        length_share=round(tally.length_share, 3),
        trainer_idle_share=round(tally.idle_s / tally.seconds, 3),
        slots_busy_share=round(tally.busy / tally.seconds / setting.slots, 3),
        steps=tally.steps,
    )


def settings() -> Iterator[tuple[str, Setting]]:
    """Every run: the trainer's name and the setting."""
    for trainer, step_s in TRAINERS.items():
        for admission in Admission:
            for on_stale in OnStale:
                for bound in STALENESS:
                    setting = Setting(max_staleness=bound, on_stale=on_stale, admission=admission, step_s=step_s)
                    yield trainer, setting


def measure(*, warm_up_s: float = WARM_UP_S, window_s: float = WINDOW_S) -> Iterator[Row]:
    for trainer, setting in settings():
        yield row(trainer, setting, simulate(setting, warm_up_s=warm_up_s, window_s=window_s))


def draw(rows: Sequence[Row], folder: Path = plots.FOLDER) -> Path:
    """The trainers below each other; throughput, waste, prompts lost and age beside each other."""
    columns = {
        "trained tokens/s": ("trained_tokens_per_s", 1, 7500),
        "wasted tokens, % of decoded": ("wasted_share", 100, 100),
        "prompts never trained, %": ("prompts_lost_share", 100, 100),
        "mean staleness of trained groups": ("mean_staleness", 1, 8),
    }
    figure, axes = plots.grid(len(TRAINERS), len(columns), width=3.3, height=2.5)
    for line, (trainer, step_s) in enumerate(TRAINERS.items()):
        for column, (title, (name, factor, top)) in enumerate(columns.items()):
            axis = axes[line][column]
            for admission in Admission:
                for on_stale in OnStale:
                    named = (trainer, admission, on_stale)
                    chosen = [one for one in rows if (one.trainer, one.admission, one.on_stale) == named]
                    requeue = on_stale is OnStale.REQUEUE
                    axis.plot(
                        [one.max_staleness for one in chosen],
                        [factor * getattr(one, name) for one in chosen],
                        color=plots.BLUE if admission is Admission.PACE else plots.ORANGE,
                        label=f"{admission}, {on_stale}",
                        linestyle=":" if requeue else "-",
                        marker="x" if requeue else "o",
                        markersize=5 if requeue else 3.5,
                    )
            axis.set_ylim(0, top)
            axis.set_xticks(list(STALENESS))
            if line == 0:
                axis.set_title(title, fontsize=10.5, color=plots.INK)
            if line == len(TRAINERS) - 1:
                axis.set_xlabel("max_staleness", fontsize=9.5)
        axes[line][0].set_ylabel(f"trainer {trainer}\n({step_s:g} s a step)", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=10)
    return plots.save(figure, "staleness", folder)


def table(rows: Iterable[Row]) -> Iterator[str]:
    """Lines as the rows come."""
    yield (
        f"{'trainer':<8}{'admission':<11}{'on_stale':<10}{'S':>2}{'trained/s':>11}{'wasted':>9}{'mean age':>10}"
        f"{'prompts lost':>14}{'length':>8}{'trainer idle':>14}{'slots busy':>12}"
    )
    for one in rows:
        yield (
            f"{one.trainer:<8}{one.admission:<11}{one.on_stale:<10}{one.max_staleness:>2}"
            f"{one.trained_tokens_per_s:>11.0f}{one.wasted_share:>9.1%}{one.mean_staleness:>10.2f}"
            f"{one.prompts_lost_share:>14.1%}{one.length_share:>8.2f}{one.trainer_idle_share:>14.1%}"
            f"{one.slots_busy_share:>12.1%}"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--window", type=float, default=WINDOW_S, help="virtual seconds of each run")
    arguments.add_argument("--folder", type=Path, default=plots.FOLDER, help="for staleness.png and staleness.json")
    arguments.add_argument(
        "--check", action="store_true", help="one setting on the real service, beside the simulation"
    )
    arguments.add_argument("--admission", type=Admission, choices=list(Admission), default=Admission.SLOTS)
    arguments.add_argument("--max-staleness", type=int, default=2)
    given = arguments.parse_args()
    if given.check:
        from benchmarks.staleness_check import check  # it needs the trainer's client, the simulation does not

        check(Setting(max_staleness=given.max_staleness, admission=given.admission, scoring_s=0.1))
        return
    rows: list[Row] = []
    for text in table(_kept(rows, measure(window_s=given.window))):
        print(text, flush=True)
    print(f"\n{write(rows, given.folder)}, {draw(rows, given.folder)}")


def write(rows: Sequence[Row], folder: Path) -> Path:
    """The figures, a row a line."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "staleness.json"
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(one)) for one in rows) + "\n]\n")
    return path


def _kept(kept: list[Row], rows: Iterable[Row]) -> Iterator[Row]:
    for one in rows:
        kept.append(one)
        yield one


if __name__ == "__main__":
    main()
