"""One frame of `rollout-service top`: a live view as renderables. Pure.

What always holds: what matters most stands on top, so that a low window cuts off old events and nothing else first;
every text of the service passes `text.plain` before it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_service.console.doing import Doing, Level, doing
from rollout_service.console.shapes import Engine, Event, Live, Status
from rollout_service.console.text import (
    bar,
    clock,
    count,
    flow,
    many,
    number,
    one_line,
    plain,
    rate,
    span,
    sparkline,
    words,
)

OUTSTANDING = ("pending", "generating", "scoring", "ready", "leased")
ENDED = ("acked", "stale", "dropped", "failed")
WIDE = 110
GROUPS_WIDTH = 62
"""Columns from which on engines stand beside the groups."""
MOST_ENGINES = 12
BAR = 10
LEFT: Literal["left"] = "left"
RIGHT: Literal["right"] = "right"
STYLES = {Level.GOOD: "bold green", Level.WAITING: "bold yellow", Level.TROUBLE: "bold white on red"}
STATE_STYLES = {
    "generating": "cyan", "scoring": "blue", "ready": "green", "leased": "magenta",
    "acked": "green", "stale": "yellow", "dropped": "yellow", "failed": "red",
}  # fmt: skip
BAD_EVENTS = frozenset({"halted", "group_failed", "engine_down", "store_down"})
DIM = "bright_black"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """How the console stands with the service."""

    lost_for_s: float | None = None
    """Seconds since the last answer, once the connection is gone; None: it is there."""
    why: str = ""


CONNECTED = Link()


def frame(live: Live, *, url: str, link: Link = CONNECTED, width: int = 100, recent: int = 50) -> RenderableType:
    """`width`: columns there are. `recent`: most events shown."""
    status = live.status
    parts: list[RenderableType] = [_header(live, url, width)]
    if link.lost_for_s is not None:
        parts.append(
            words(f"Connection lost {span(link.lost_for_s)} ago; trying again. {link.why}", "bold white on red")
        )
        parts.append(words("What follows is how things were then.", DIM))
    parts += sentence(doing(status, at=live.at, rates=live.rates))
    parts += [Text(), facts(live, width), Text()]
    if width >= WIDE:
        beside = Table.grid(padding=(0, 3, 0, 0))
        beside.add_column(no_wrap=True, width=GROUPS_WIDTH)
        beside.add_column()
        beside.add_row(groups(status), engines(status.engines))
        parts.append(beside)
    else:
        parts += [groups(status), Text(), engines(status.engines)]
    parts += [Text(), numbers(live, width)]
    if live.recent and recent > 0:
        parts += [Text(), Text("RECENT", style="bold"), events(live.recent[:recent])]
    return Group(*parts)


def _header(live: Live, url: str, width: int) -> Text:
    name = f"rollout-service {live.version}".strip()
    line = one_line(f"{name}  {live.mode}  {url}  {clock(live.at)} UTC", "reverse")
    line.pad_right(max(0, width - line.cell_len))
    return line


def sentence(what: Doing) -> list[Text]:
    """The sentence, and under it what more there is to say."""
    return [words(what.text, STYLES[what.level], most=600), *(words(f"  {line}", most=600) for line in what.more)]


def facts(live: Live, width: int) -> Text:
    """Versions, slots, leases, rates: two or three lines."""
    status, rates = live.status, live.rates
    slots, oldest = status.slots, status.oldest_outstanding
    pieces = [
        Text.assemble(
            ("version ", DIM), (count(status.policy_version), "bold"), (f" max staleness {status.max_staleness}", DIM)
        ),
        Text.assemble(
            ("slots ", DIM),
            (f"{count(slots.used)}/{count(slots.total)} ", "bold"),
            (f"{bar(slots.used, slots.total, BAR):<{BAR}}", "cyan"),
        ),
        Text.assemble(("leases ", DIM), (count(status.leases.live), "bold")),
    ]
    if status.leases.waiting_calls:
        pieces.append(Text(f"{many(status.leases.waiting_calls, 'lease call')} waiting", DIM))
    if rates is not None:
        pieces += [
            Text.assemble((f"{name}/s ", DIM), (rate(value), "bold"))
            for name, value in (
                ("rollouts", rates.rollouts_per_s),
                ("tokens", rates.tokens_per_s),
                ("groups", rates.groups_per_s),
            )
        ]
    if oldest is not None:
        pieces.append(words(f"oldest {oldest.group_id} {oldest.state} {span(oldest.age_s)}", DIM, most=80))
    if (threads := status.threads) is not None and (threads.busy or threads.stuck):
        pieces.append(Text(f"threads {count(threads.busy)}/{count(threads.total)}", DIM))
        if threads.stuck:
            pieces.append(Text(f"{count(threads.stuck)} STUCK: told to end, and go on", "bold red"))
    return flow(pieces, width)


def groups(status: Status) -> Table:
    """Groups by state: outstanding ones on the left, ended ones on the right, each with bars of their own scale."""
    both = Table.grid(padding=(0, 3, 0, 0))
    both.add_row(
        _states(f"OUTSTANDING {count(status.outstanding)}", status, OUTSTANDING),
        _states(f"ENDED {count(max(0, status.submitted - status.outstanding))}", status, ENDED),
    )
    return both


def _states(title: str, status: Status, states: tuple[str, ...]) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    for justify in (LEFT, RIGHT, LEFT):
        table.add_column(justify=justify, no_wrap=True)
    most = max((status.count(state) for state in states), default=0)
    for state in states:
        value, style = status.count(state), STATE_STYLES.get(state, "")
        # Padded by hand: a grid within a grid would give the space away.
        name, filled = Text(f"{state:<10}"), f"{bar(value, most, BAR):<{BAR}}"
        table.add_row(name, Text(f"{count(value):>6}", style if value else DIM), Text(filled, style))
    return Group(Text(title, "bold"), table)


def engines(found: tuple[Engine, ...]) -> RenderableType:
    """One row an engine, those that are out first; of many only some."""
    title = Text(f"ENGINES {sum(engine.healthy for engine in found)} of {len(found)} healthy", "bold")
    table = Table.grid(padding=(0, 1, 0, 0))
    for justify in (LEFT, RIGHT, LEFT, LEFT):
        table.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
    shown = sorted(found, key=lambda engine: engine.healthy)[:MOST_ENGINES]
    for engine in shown:
        table.add_row(
            one_line(engine.url, "" if engine.healthy else "red", most=60),
            Text(f"{count(engine.in_flight)}/{count(engine.max_inflight)}"),
            Text(f"{bar(engine.in_flight, engine.max_inflight, 8):<8}", "cyan"),
            condition(engine),
        )
    rest = [Text(f"… and {len(found) - len(shown)} more", DIM)] if len(found) > len(shown) else []
    return Group(title, table, *rest)


def condition(engine: Engine) -> Text:
    """Whether it gets work, and why not."""
    if engine.leaving:
        return Text("leaving", "yellow")
    if engine.healthy:
        weights = "" if engine.weight_version is None else f", weights {engine.weight_version}"
        if engine.doubtful:
            return one_line(f"up, doubtful{weights}", "yellow", most=40)
        return one_line(f"up{weights}", "green", most=40)
    error = engine.error or "no reason given"
    return one_line(error if engine.behind else f"down: {error}", "red", most=200)


def numbers(live: Live, width: int) -> Table:
    """Rewards, staleness, tokens and failures, a line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=DIM, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("reward", rewards(live, max(10, min(120, width - 56))))
    if live.staleness:
        by = "   ".join(f"{count(each.staleness)}: {count(each.groups)}" for each in live.staleness[:16])
        table.add_row("staleness", Text(f"groups delivered at {by}"))
    totals = live.totals
    generated, wasted = totals.tokens_generated, sum(totals.tokens_wasted.values())
    tokens = Text(f"{count(generated)} generated, {count(totals.tokens_delivered)} delivered, ")
    tokens.append(f"{count(wasted)} wasted", "yellow" if wasted else "")
    if wasted:
        share = f" ({wasted / generated:.1%})" if generated >= wasted else ""
        tokens.append(f"{share}: {_reasons(totals.tokens_wasted)}")
    table.add_row("tokens", tokens)
    failed = sum(totals.rollouts_failed.values())
    rollouts = Text(f"{count(totals.rollouts_finished)} finished, {count(totals.aborts)} aborted, ")
    rollouts.append(f"{count(failed)} failed", "red" if failed else "")
    if failed:
        rollouts.append(f": {_reasons(totals.rollouts_failed)}")
    table.add_row("rollouts", rollouts)
    return table


def _reasons(counts: Mapping[str, int]) -> str:
    found = sorted(((name, value) for name, value in counts.items() if value), key=lambda each: -each[1])
    return ", ".join(f"{plain(name, 40)} {count(value)}" for name, value in found[:8])


def rewards(live: Live, width: int) -> Text:
    """The mean reward by version as a sparkline of the last `width` versions, with the scale in words."""
    points = live.rewards[-width:]
    known = [point for point in points if point.mean is not None]
    if not known:
        return Text("no group delivered yet", style=DIM)
    means = [point.mean for point in known if point.mean is not None]
    last = known[-1]
    text = Text(sparkline([point.mean for point in points]), "green")
    text.append(f"  {number(last.mean)}", "bold").append(f" at version {count(last.policy_version)}")
    return text.append(f"  (from {number(min(means))} to {number(max(means))}, {many(len(points), 'version')})", DIM)


def events(recent: tuple[Event, ...]) -> Table:
    """Newest first, one line each."""
    table = Table.grid(padding=(0, 1))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for event in recent:
        style = "red" if event.kind in BAD_EVENTS else ""
        who = [plain(value, 60) for value in (event.group_id, event.engine) if value and value not in event.text]
        said = " ".join([*who, event.text])
        table.add_row(Text(clock(event.at), DIM), words(event.kind, style, most=20), one_line(said, style, most=300))
    return table
