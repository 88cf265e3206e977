"""What the terminal shows of a live view, without a terminal and without a service."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from rollout_service.console import frame as frames
from rollout_service.console import tables, text
from rollout_service.console.doing import Level, doing, not_ready
from rollout_service.console.frame import Link
from rollout_service.console.shapes import Engines, GroupDetail, GroupPage, Live, Shape, Status
from tests.shell import console_service as scripted

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b1m\x90q\x00\b\r\ttab\x7f\x85\u2028\u202eevil\u200b\ud800"
    "[bold red]x[/bold red][/] [link=http://evil]y[/link] :skull: \\["
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def parsed(kind: type[Any], value: Any) -> Any:
    return msgspec.json.decode(json.dumps(value).encode(), type=kind)


def live(**changes: Any) -> Live:
    return parsed(Live, scripted.live(**changes))


def status(groups: dict[str, int] | None = None, **changes: Any) -> Status:
    return parsed(Status, scripted.status(groups, **changes))


def shown(what: RenderableType, *, width: int = 120, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO given above


def frame(view: Live, *, width: int = 120, link: Link = frames.CONNECTED, colour: bool = False) -> str:
    return shown(frames.frame(view, url="http://svc:8080", width=width, link=link), width=width, colour=colour)


# the sentence


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        ({}, Level.GOOD, "Generating: 12 of 16 slots busy"),
        ({"blocked": "pace"}, Level.GOOD, "opens no new group, waiting for the trainer"),
        ({"slots": {"total": 16, "used": 0}, "blocked": "max_ready_groups"}, Level.WAITING, "Waiting for the trainer"),
        ({"slots": {"total": 16, "used": 0}, "blocked": "max_ready_bytes"}, Level.WAITING, "groups.max_ready_bytes"),
        ({"slots": {"total": 16, "used": 0}, "blocked": "wait_for_version"}, Level.WAITING, "first sync"),
        ({"slots": {"total": 16, "used": 0}, "blocked": "of_a_later_version"}, Level.WAITING, "of_a_later_version"),
        (
            {"paused": True, "blocked": "paused"},
            Level.WAITING,
            "Paused: no new engine requests; what is in flight goes on (12",
        ),
        ({"halted": scripted.halt(), "paused": True}, Level.TROUBLE, "HALTED: 1 groups failed in a row"),
        ({"store": {"ok": False, "error": "disk full"}}, Level.TROUBLE, "The store cannot commit"),
        ({"engines": []}, Level.TROUBLE, "There is no engine"),
        ({"engines": [scripted.engine(healthy=False, error="refused")]}, Level.TROUBLE, "No healthy engine"),
    ],
)
def test_one_sentence_says_what_the_run_does(given: dict[str, Any], level: Level, says: str):
    said = doing(status(**given))
    assert said.level is level
    assert says in said.text


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"scoring": 2}, "Scoring 2 groups"),
        ({"pending": 3}, "About to dispatch"),
        ({"ready": 3}, "Waiting for the trainer to lease 3"),
        ({"leased": 1}, "Waiting for the trainer to ack 1"),
        ({"acked": 9}, "Waiting for prompts"),
    ],
)
def test_with_nothing_in_flight_it_says_whom_the_run_waits_for(groups: dict[str, int], says: str):
    assert says in doing(status(groups, slots={"total": 16, "used": 0})).text


def test_an_exhausted_run_is_no_trouble_even_without_engines():
    said = doing(status({"acked": 9}, final=True, slots={"total": 16, "used": 0}, engines=[]))
    assert (said.level, said.text.split(":")[0]) == (Level.GOOD, "Exhausted")


def test_a_halt_shows_reason_group_engine_error_age_and_what_to_do():
    page = frame(live(status_=scripted.status(halted=scripted.halt())))
    for part in (
        "HALTED 2 min 3 s ago", "1 groups failed in a row", "g-9", "http://10.0.0.0:8000", "the prompt is cursed",
        "POST /resume", "rollout-service groups g-9",
    ):  # fmt: skip
        assert part in page


def test_not_ready_is_what_readyz_says():
    assert not_ready(status()) is None
    assert not_ready(status(paused=True)) is None
    assert "halted" in (not_ready(status(halted=scripted.halt())) or "")
    assert "store" in (not_ready(status(store={"ok": False, "error": "x"})) or "")
    assert "engine" in (not_ready(status(engines=[scripted.engine(healthy=False)])) or "")
    assert "engine" in (not_ready(status(engines=[])) or "")


# the frame


@pytest.mark.parametrize("width", [80, 140])
def test_a_frame_shows_versions_slots_rates_groups_engines_rewards_waste_and_events(width: int):
    page = frame(live(), width=width)
    joined = re.sub(r"\s+", " ", page)
    for part in (
        "rollout-service 0.1.0", "http://svc:8080", "version 7", "max staleness 4", "slots 12/16", "tokens/s 1,234",
        "OUTSTANDING 34", "ENDED 90", "http://10.0.0.0:8000", "12/256", "▁▂▃▄▅▆▇█", "0.875 at version 7",
        "2,000 wasted (2.0%)", "stale 1,500", "5 failed", "timeout 4", "g-88", "timeout after 600 s",
    ):  # fmt: skip
        assert part in joined
    assert max(map(len, page.splitlines())) <= width


@pytest.mark.parametrize("width", [20, 40, 80, 110, 250])
def test_no_line_is_wider_than_the_terminal(width: int):
    view = live(status_=scripted.status(halted=scripted.halt(error="long " * 100)))
    assert max(map(len, frame(view, width=width).splitlines())) <= width


def test_a_lost_connection_is_said_above_everything_else():
    lines = frame(live(), link=Link(lost_for_s=72.0, why="nothing answers")).splitlines()
    assert "Connection lost 1 min 12 s ago; trying again. nothing answers" in lines[1]


def test_a_run_that_has_just_begun_has_a_frame():
    nothing = {"rates": None, "totals": {}, "staleness": [], "rewards": [], "recent": []}
    page = frame(live(status_=scripted.status({}, slots={"total": 16, "used": 0}), **nothing))
    assert "no group delivered yet" in page
    assert "Waiting for prompts" in page


def test_members_of_a_later_version_are_ignored_and_missing_ones_have_defaults():
    least = {"policy_version": 1, "groups": {}, "slots": {"total": 1, "used": 0}, "engines": [], "news": {"a": [1]}}
    assert "version 1" in frame(parsed(Live, {"at": "2026-11-30T01:02:03Z", "status": least, "more": 1}))


def test_engines_that_are_out_come_first_and_of_many_only_some_are_listed():
    many = [scripted.engine(n) for n in range(30)] + [scripted.engine(30, healthy=False, error="refused")]
    rows = shown(frames.engines(status(engines=many).engines)).splitlines()
    assert rows[0] == "ENGINES 30 of 31 healthy"
    assert "http://10.0.0.30:8000" in rows[1]
    assert "down: refused" in rows[1]
    assert rows[-1].startswith("… and 19 more")


def test_the_reward_line_has_a_gap_where_a_version_delivered_nothing():
    points = [{"policy_version": v, "mean": m} for v, m in enumerate((0.0, None, 1.0))]
    assert frames.rewards(live(rewards=points), 80).plain.startswith("▁ █  1 at version 2  (from 0 to 1")


def test_of_many_versions_the_reward_line_shows_the_last_ones():
    points = [{"policy_version": v, "mean": 1.0 if v < 200 else 0.5} for v in range(240)]
    assert frames.rewards(live(rewards=points), 40).plain.startswith("▄" * 40 + "  0.5 at version 239")


# hostile texts


def poisoned(value: Any) -> Any:
    """`value` with every text in it, and every key that is a name of others, replaced."""
    if isinstance(value, str):
        return HOSTILE
    if isinstance(value, list):
        return [poisoned(each) for each in value]
    if isinstance(value, dict):
        return {name: poisoned(each) for name, each in value.items()}
    return value


def everything() -> list[RenderableType]:
    """Every renderable of this room, made of hostile texts only."""
    engines = [scripted.engine(0), scripted.engine(1, healthy=False, error="x"), scripted.engine(2, behind=True)]
    values = scripted.live(scripted.status(halted=scripted.halt(), engines=engines))
    values = poisoned(values)
    values["totals"]["tokens_wasted"] = values["totals"]["rollouts_failed"] = {HOSTILE: 5}
    halted = raw(Live, values)
    values["status"]["halted"] = None
    blocked = raw(Live, {**values, "status": {**values["status"], "blocked": HOSTILE}})
    store = raw(Live, {**values, "status": {**values["status"], "store": {"ok": False, "error": HOSTILE}}})
    dark = raw(Live, {**values, "status": {**values["status"], "engines": poisoned(engines[1:2])}})
    lost = Link(lost_for_s=1.0, why=HOSTILE)
    views = [frames.frame(view, url=HOSTILE, link=lost) for view in (halted, blocked, store, dark)]
    group = poisoned(scripted.detail()) | {"reward_errors": {HOSTILE: HOSTILE}}
    page = {"groups": [poisoned(scripted.group(reason="x", error="y"))], "next": HOSTILE}
    return [
        *views,
        tables.status_table(halted.status, 100),
        tables.engines_table(raw(Engines, {"engines": poisoned(engines)}).engines),
        tables.groups_table(raw(GroupPage, page)),
        tables.group_view(raw(GroupDetail, group)),
        tables.group_view(raw(GroupDetail, group | {"prompt": HOSTILE})),
        tables.group_view(raw(GroupDetail, group | {"prompt": [{"role": HOSTILE, "content": [HOSTILE]}]})),
    ]


def raw(kind: type[Shape], value: Any) -> Any:
    """Without JSON between, which would refuse the lone surrogate."""
    return msgspec.convert(value, kind)


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("width", [60, 200])
def test_no_text_of_others_reaches_the_terminal_as_a_command_or_as_markup(colour: bool, width: int):
    for what in everything():
        page = COLOUR.sub("", shown(what, width=width, colour=colour))
        assert all(character.isprintable() or character == "\n" for character in page)
        assert "💀" not in page
    page = frame(live(recent=[{"at": "x", "kind": "halted", "text": "[red]x[/red] [/] :skull:"}]))
    assert "[red]x[/red] [/] :skull:" in page


def test_what_is_not_printable_is_written_as_its_escape():
    assert text.plain("a\x1b[2Jb\nc\x9bd\u202ee") == "a\\x1b[2Jb c\\x9bd\\u202ee"
    assert text.plain("grün 漢字 🙂") == "grün 漢字 🙂"
    assert text.plain("x" * 500) == "x" * 400 + "…"


# numbers


@pytest.mark.parametrize(
    ("seconds", "says", "briefly"),
    [
        (0.4, "0 s", "0s"),
        (59.6, "1 min 0 s", "1m"),
        (3725, "1 h 2 min", "1h"),
        (187_200, "2 d 4 h", "2d"),
        (-5, "0 s", "0s"),
    ],
)
def test_spans_are_said_in_their_largest_units(seconds: float, says: str, briefly: str):
    assert (text.span(seconds), text.short(seconds)) == (says, briefly)


def test_a_bar_never_draws_something_as_nothing_and_never_more_than_all():
    assert text.bar(0, 10, 8) == ""
    assert text.bar(1, 1_000_000, 8) == "▏"
    assert text.bar(5, 10, 8) == "████"
    assert text.bar(50, 10, 8) == "████████"


def test_ages_come_from_the_clock_of_the_service_alone():
    assert text.since("2026-11-30T01:00:00Z", "2026-11-30T01:02:03.456Z") == "2 min 3 s"
    assert text.since("yesterday", "2026-11-30T01:02:03Z") is None
    assert text.since("2026-11-30T01:00:00", "2026-11-30T01:02:03Z") is None


# tables


def test_a_group_shows_every_rollout_with_its_completion_or_why_it_failed():
    page = shown(tables.group_view(parsed(GroupDetail, scripted.detail())), width=160)
    for part in ("What colour is the sea?", "the sea is blue", "timeout: no answer in 600 s", "running 3 s", "waiting"):
        assert part in page


def test_a_list_of_groups_says_how_to_go_on():
    rows = [scripted.group(1), scripted.group(2, state="dropped", reason="unscorable", error="no reward scored it")]
    page = shown(tables.groups_table(parsed(GroupPage, {"groups": rows, "next": "g-2"})), width=160)
    assert "dropped (unscorable)" in page
    assert "no reward scored it" in page
    assert "more: --after g-2" in page
    assert "no groups" in shown(tables.groups_table(parsed(GroupPage, {"groups": [], "next": None})))
