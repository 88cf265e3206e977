"""Tokens decoded for nothing while versions come steadily: the service with `slots` and with `pace`, and TRL's worker.

What is measured: 256 requests in flight, completions of 4 s ± 50 % on a lean engine, a version every 3 s,
`max_staleness` 1, groups of 8. Each of the three has an engine of its own and they run at the same time, for they use
little of the machine; the trainer takes whatever is ready at once. From each engine's journal come the tokens decoded
in a window, and of these the tokens decoded after their group had become stale (its version is the one posted last when
its first request arrived; it is stale from just before the call that posts the version after next), and the tokens of
groups that the trainer got. Journals go on after the last window until the fate of its groups is known.

    python -m benchmarks.waste [--rounds 5] [--quick]
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.engine import Entry
from benchmarks.load import GROUP, Times
from benchmarks.report import Figure, Goal, Side, below, median, run_alone, say, shown
from benchmarks.serving import Acker, Engine, Versions, decoded, lean_engine, service, submit
from benchmarks.trl_worker import MAX_STALENESS, SCORE_QUEUE, TrlWorker, trl_worker

IN_FLIGHT = 256
LATENCY_S, SPREAD = 4.0, 0.5
MAX_TOKENS = 128
"""More than the longest completion has."""
BUMP_EVERY_S = 3.0
GROUPS_PER_STEP = IN_FLIGHT // GROUP // (MAX_STALENESS + 1)
"""For `pace`: as many as keep all slots busy while every opened group is in flight."""
WARM_UP_S, WINDOW_S, AFTER_S = 9.0, 12.0, 9.0
"""A window is four versions; what began in it has ended or gone stale after AFTER_S."""
QUICK_WARM_UP_S, QUICK_WINDOW_S = 3.0, 6.0
PROMPTS = 4000
TRL_ROWS = 16_384
"""So many that no prompt comes twice: prompts tell groups apart."""

FIRST_DIGIT = ord("0") - ord("!")
"""TRL's tokenizer here numbers bytes by their printable symbols, of which "!" is the first."""

Key = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened at one engine."""

    entries: Sequence[Entry]
    bumps: Sequence[float]
    """When versions 1, 2, … were posted."""
    delivered: Collection[Key]
    """Groups that the trainer got in time."""
    key: Callable[[Entry], Key]
    """The group, and its attempt, of a request."""
    started: float
    """When the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the tokens decoded in a window."""

    tokens: float
    stale: float
    delivered: float


def shares(story: Story, start: float, end: float) -> Shares:
    """What became of the tokens decoded between `start` and `end`."""
    first: dict[Key, float] = {}
    for entry in story.entries:
        key = story.key(entry)
        first[key] = min(first.get(key, entry.started), entry.started)
    total = stale = delivered = 0.0
    for entry in story.entries:
        key = story.key(entry)
        tokens = decoded(entry, start, end)
        total += tokens
        delivered += tokens if key in story.delivered else 0.0
        version = bisect_right(story.bumps, first[key])
        if version + MAX_STALENESS < len(story.bumps):
            stale += decoded(entry, max(start, story.bumps[version + MAX_STALENESS]), end)
    if not total:
        raise RuntimeError("nothing was decoded in the window")
    return Shares(tokens=total, stale=stale / total, delivered=delivered / total)


def of_service(engine: Engine, admission: str, run_s: float) -> Story:
    """One run of the service."""
    dispatch: dict[str, object] = {"max_inflight_rollouts": IN_FLIGHT, "admission": admission}
    if admission == "pace":
        dispatch["groups_per_step"] = GROUPS_PER_STEP
    tables: dict[str, dict[str, object]] = {
        "groups": {"max_staleness": MAX_STALENESS, "num_generations": GROUP},
        "dispatch": dispatch,
        "sampling": {"max_tokens": MAX_TOKENS},
    }
    bumps: list[float] = []
    with service(engine.url, tables) as running:
        submit(running.url, PROMPTS)
        started = time.monotonic()
        with Acker(running.url) as trainer, Versions(running.url) as versions:
            while (due := started + (len(bumps) + 1) * BUMP_EVERY_S) < started + run_s:
                time.sleep(max(0.0, due - time.monotonic()))
                bumps.append(time.monotonic())
                versions.post()
            time.sleep(max(0.0, started + run_s - time.monotonic()))
    # The service has ended, and with it every request: each entry has an end.
    return Story(entries=engine.journal(), bumps=bumps, delivered=trainer.acked, key=group_and_attempt, started=started)


def group_and_attempt(entry: Entry) -> tuple[str, int]:
    """Of a request of the service, from its id `{group}.{attempt}.{row}-{number}`."""
    group, attempt, _ = entry.id.rpartition("-")[0].rsplit(".", 2)
    return group, int(attempt)


def of_trl(engine: Engine, trl: TrlWorker, run_s: float) -> Story:
    """One run of TRL's worker; its groups are told apart by their prompts."""
    found = trl.run(
        engine.url,
        Times(0.0, run_s),
        in_flight=IN_FLIGHT,
        score_queue=SCORE_QUEUE,
        rows=TRL_ROWS,
        max_tokens=MAX_TOKENS,
        bump_every_s=BUMP_EVERY_S,
    )
    return Story(
        entries=engine.journal(),
        bumps=found["bumps"],
        delivered=set(found["delivered"]),
        key=prompt_text,
        started=found["window"][0],
    )


def prompt_text(entry: Entry) -> str:
    """Of a request of TRL's: the eight digits that are its prompt, without the template's markers."""
    ids = [int(number) - FIRST_DIGIT for number in entry.prompt.strip("[]").split(",")]
    return "".join(str(digit) for digit in ids if 0 <= digit <= 9)


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    warm_up_s, window_s = (QUICK_WARM_UP_S, QUICK_WINDOW_S) if quick else (WARM_UP_S, WINDOW_S)
    run_s = warm_up_s + rounds * window_s + AFTER_S
    with (
        trl_worker() as trl,
        lean_engine(LATENCY_S, spread=SPREAD) as one,
        lean_engine(LATENCY_S, spread=SPREAD) as two,
        lean_engine(LATENCY_S, spread=SPREAD) as three,
        ThreadPoolExecutor(3) as pool,
    ):
        running = {
            "slots": pool.submit(of_service, one, "slots", run_s),
            "pace": pool.submit(of_service, two, "pace", run_s),
            "TRL": pool.submit(of_trl, three, trl, run_s),
        }
        stories = {name: future.result() for name, future in running.items()}
    found: dict[str, list[Shares]] = {}
    for name, story in stories.items():
        starts = [story.started + warm_up_s + number * window_s for number in range(rounds)]
        found[name] = [shares(story, start, start + window_s) for start in starts]
        for one_window in found[name]:
            say(f"  {name}: {one_window}")
    return _figures(found, window_s)


def _figures(found: dict[str, list[Shares]], window_s: float) -> list[Figure]:
    stale = {name: tuple(share.stale for share in runs) for name, runs in found.items()}
    delivered = {name: tuple(share.delivered for share in runs) for name, runs in found.items()}
    rates = {
        name: shown(median(share.tokens * share.delivered / window_s for share in runs), "tokens/s")
        for name, runs in found.items()
    }
    setting = "256 in flight, 4 s ± 50 %, a version every 3 s, S = 1"
    theirs = shown(median(stale["TRL"]), "%")
    return [
        Figure(
            key="stale_decoded_share",
            what=f"tokens decoded for groups already stale, of all ({setting})",
            value=median(stale["slots"]),
            unit="%",
            beside=f"pace {shown(median(stale['pace']), '%')}, TRL {theirs}",
            goal=below(0.005),
            runs=stale["slots"],
        ),
        Figure(
            key="stale_decoded_share_trl",
            what="the same of TRL's worker",
            value=median(stale["TRL"]),
            unit="%",
            runs=stale["TRL"],
        ),
        Figure(
            key="delivered_share_slots",
            what='tokens in groups delivered, of all, admission = "slots"',
            value=median(delivered["slots"]),
            unit="%",
            beside=f"TRL {shown(median(delivered['TRL']), '%')}; delivered {rates['slots']}, TRL {rates['TRL']}",
            runs=delivered["slots"],
        ),
        Figure(
            key="delivered_share_pace",
            what='tokens in groups delivered, of all, admission = "pace"',
            value=median(delivered["pace"]),
            unit="%",
            beside=f"delivered {rates['pace']}",
            goal=Goal(side=Side.AT_LEAST, bound=2 * median(delivered["slots"])),
            runs=delivered["pace"],
            note=f"The goal is twice the share of slots. groups_per_step = {GROUPS_PER_STEP}.",
        ),
    ]


if __name__ == "__main__":
    run_alone(measure, "tokens decoded for nothing while versions come steadily")
