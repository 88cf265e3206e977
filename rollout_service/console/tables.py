"""What `status`, `groups` and `engines` print for people. Pure.

What always holds: one row a group, a rollout or an engine; every text of the service passes `text.plain`.
"""

from __future__ import annotations

import json

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollout_service.console.doing import doing
from rollout_service.console.frame import DIM, STATE_STYLES, facts, groups, sentence
from rollout_service.console.frame import engines as engine_rows
from rollout_service.console.shapes import Engine, GroupDetail, GroupPage, GroupRow, Live, RolloutRow, Status
from rollout_service.console.text import NONE, count, number, one_line, plain, short, span, words

PROMPT_CHARACTERS = 600
COMPLETION_CHARACTERS = 300


def status_table(status: Status, width: int) -> RenderableType:
    """The run in ten lines."""
    return Group(
        *sentence(doing(status)),
        Text(),
        facts(Live(at="", status=status), width),
        Text(),
        groups(status),
        Text(),
        engine_rows(status.engines),
    )


def engines_table(engines: tuple[Engine, ...]) -> RenderableType:
    """One row an engine."""
    if not engines:
        return Text("no engine")
    table = _table("id", "engine", "state", "load", "model", "weights", "error", whole=4)
    for engine in engines:
        state = "up" if engine.healthy else "behind" if engine.behind else "down"
        colour = "green" if engine.healthy else "red"
        if engine.leaving or (engine.healthy and engine.doubtful):
            state, colour = "leaving" if engine.leaving else "doubtful", "yellow"
        table.add_row(
            words(engine.id, most=20),
            words(engine.url, most=120),
            Text(state, colour),
            Text(f"{count(engine.in_flight)}/{count(engine.max_inflight)}"),
            words(engine.model or NONE, most=60),
            words(NONE if engine.weight_version is None else engine.weight_version, most=20),
            words(engine.error or "", "red"),
        )
    return table


def groups_table(page: GroupPage) -> RenderableType:
    """One row a group, in order of submission."""
    if not page.groups:
        return Text("no groups")
    table = _table("group", "state", "prompt", "attempt", "version", "staleness", "age", "since", "error", whole=2)
    for row in page.groups:
        table.add_row(
            words(row.group_id, most=32),
            _state(row),
            one_line(row.prompt_id, most=40),
            Text(count(row.attempt)),
            Text(_or_dash(row.policy_version)),
            Text(_or_dash(row.staleness)),
            Text(short(row.age_s)),
            Text(short(row.state_age_s)),
            one_line(row.error or "", "red", most=200),
        )
    if page.next is None:
        return table
    return Group(table, words(f"more: --after {plain(page.next, 32)}", DIM))


def group_view(group: GroupDetail) -> RenderableType:
    """One group: where it stands, its prompt, and each rollout."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style=DIM, no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("group", words(group.group_id, "bold", most=32))
    head.add_row("state", _state(group).append(f" for {span(group.state_age_s)}"))
    head.add_row("prompt id", words(f"{group.prompt_id} (epoch {group.epoch})"))
    version = "not dispatched yet" if group.policy_version is None else f"version {group.policy_version}"
    staleness = "" if group.staleness is None else f", staleness {group.staleness}"
    head.add_row("generated at", Text(f"{version}{staleness}, attempt {group.attempt}"))
    if group.error:
        head.add_row("error", words(group.error, "red", most=2000))
    for name, error in group.reward_errors.items():
        head.add_row("reward error", words(f"{name}: {error}", "red", most=2000))
    if group.prompt is not None:
        head.add_row("prompt", words(_prompt(group.prompt), most=PROMPT_CHARACTERS))
    return Group(head, Text(), _rollouts(group.rollouts))


def _rollouts(rollouts: tuple[RolloutRow, ...]) -> RenderableType:
    if not rollouts:
        return Text("no rollouts: not dispatched yet, or ended and removed", style=DIM)
    table = _table(
        "row", "state", "tokens", "reward", "advantage", "attempts", "engine", "completion or error", whole=2
    )
    for row in rollouts:
        running = f" {span(row.in_flight_s)}" if row.in_flight_s is not None else ""
        state = f"{row.state}{running}" if row.state != "finished" else row.finish_reason or row.state
        style = {"failed": "red", "finished": "green", "running": "cyan"}.get(row.state, "")
        why = f"{row.reason}: {row.error}" if row.reason else row.error
        table.add_row(
            Text(str(row.index)),
            words(state, style, most=40),
            Text(_or_dash(row.tokens)),
            Text(number(row.reward)),
            Text(number(row.advantage)),
            Text(_or_dash(row.attempts)),
            words(row.engine or NONE, most=60),
            words(why, "red") if why else words(row.text or "", most=COMPLETION_CHARACTERS),
        )
    return table


def _state(row: GroupRow) -> Text:
    reason = f" ({row.reason})" if row.reason else ""
    return words(f"{row.state}{reason}", STATE_STYLES.get(row.state, ""), most=60)


def _prompt(prompt: object) -> str:
    """Messages as `role: content` lines, ids and the rest as JSON."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        return "  ".join(f"{message.get('role', '?')}: {_content(message.get('content'))}" for message in prompt)
    return json.dumps(prompt)


def _content(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _or_dash(value: int | None) -> str:
    return NONE if value is None else count(value)


def _table(*columns: str, whole: int = 1) -> Table:
    """The first `whole` columns are not broken into lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place < whole)
    return table
