"""Engines that DNS names and files list: what a look takes, and what a fleet makes of it."""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from rollout_service.engines import EngineSpec, discovery
from rollout_service.engines.discovery import Discovery
from rollout_service.engines.sources import (
    MAX_FILE,
    MAX_LISTED,
    LookFailed,
    Source,
    addresses_of,
    read_engines,
    source_of,
)
from rollout_service.errors import Conflict, EngineRefused, NotFound, RolloutServiceError, ShuttingDown
from tests.engine_fleets import fleet_of, generate, until
from tests.engine_script import Reply, ScriptedEngine, hold

A, B, C = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"


class Address:
    def __init__(self, id: str, url: str) -> None:
        self.id, self.url = id, url


class FakeMember:
    def __init__(self, id: str, url: str) -> None:
        self.engine = Address(id, url)
        self.leaving = False


class FakeEngines:
    """Members as discovery sees them. `refuse`: URL -> what adding it raises, once it was contacted."""

    def __init__(self) -> None:
        self.members: list[FakeMember] = []
        self.refuse: dict[str, RolloutServiceError] = {}
        self.added: list[EngineSpec] = []
        self.contacts = asyncio.Event()
        """Engines answer."""
        self.contacts.set()
        self.empties = asyncio.Event()
        """What is removed becomes empty."""
        self.empties.set()
        self.full = False
        self._next = 0

    def __iter__(self) -> Iterator[FakeMember]:
        return iter(self.members)

    async def add(self, spec: EngineSpec, *, resize: bool) -> tuple[FakeMember, bool]:
        assert not resize
        self.added.append(spec)
        if self.full:
            raise Conflict("there are 3 engines already")
        for member in self.members:
            if member.engine.url == spec.url:
                return member, False
        member = FakeMember(f"e{self._next}", spec.url)
        self._next += 1
        self.members.append(member)
        await self.contacts.wait()
        if member not in self.members:
            raise Conflict("was removed before its first contact ended")
        if spec.url in self.refuse:
            self.members.remove(member)
            raise self.refuse[spec.url]
        return member, True

    async def remove(self, id: str, *, drain_s: float) -> FakeMember:
        member = next((member for member in self.members if member.engine.id == id), None)
        if member is None:
            raise NotFound("no engine")
        member.leaving = True
        await self.empties.wait()
        self.members.remove(member)
        return member

    def urls(self) -> list[str]:
        return sorted(member.engine.url for member in self.members)

    def drop(self, url: str) -> None:
        """An operator's DELETE."""
        self.members = [member for member in self.members if member.engine.url != url]

    def post(self, url: str) -> None:
        """An operator's POST."""
        self.members.append(FakeMember(f"op{len(self.members)}", url))


class ListedSource:
    """Lists what it is told to, or fails."""

    def __init__(self, *urls: str, name: str = "dns://vllm:8000", max_inflight: int = 256) -> None:
        self.name = name
        self.now: tuple[str, ...] | Exception = urls
        self.hangs = False
        self.looks = 0
        self._max_inflight = max_inflight

    async def look(self) -> Sequence[EngineSpec]:
        self.looks += 1
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.now, Exception):
            raise self.now
        return [EngineSpec(url=url, max_inflight=self._max_inflight) for url in self.now]


@asynccontextmanager
async def discovering(*sources: Source, engines: Any) -> AsyncIterator[Callable[[], Any]]:
    """Gives what looks once and waits for what follows."""
    found = Discovery(sources, engines=engines, interval_s=3600, drain_s=7)

    async def look() -> Discovery:
        await found.look()
        await settled()
        return found

    yield look
    await found.stop()


async def settled() -> None:
    """Until every change that can end has ended."""
    for _ in range(10):
        await asyncio.sleep(0)


def warnings(logs: Sequence[Any]) -> list[tuple[str, str]]:
    return [(line["event"], line.get("error", "")) for line in logs if line["log_level"] != "info"]


# -- what is listed comes and goes


async def test_what_is_listed_becomes_a_member_and_what_is_listed_no_more_goes() -> None:
    engines, source = FakeEngines(), ListedSource(A, B, max_inflight=7)
    async with discovering(source, engines=engines) as look:
        await look()
        assert (engines.urls(), {spec.max_inflight for spec in engines.added}) == ([A, B], {7})
        source.now = (B, C)
        await look()
        assert engines.urls() == [B, C]
        source.now = ()
        await look()
        assert engines.urls() == []
        source.now = (A,)
        await look()
        assert engines.urls() == [A]


async def test_a_look_that_finds_the_same_changes_nothing() -> None:
    engines = FakeEngines()
    async with discovering(ListedSource(A, B), engines=engines) as look:
        for _ in range(5):
            await look()
        assert len(engines.added) == 2


@pytest.mark.parametrize("failure", [LookFailed("no such name"), OSError("broken"), ValueError("a fault")])
async def test_a_look_that_fails_changes_nothing_and_is_said_once_a_reason(failure: Exception) -> None:
    engines, source = FakeEngines(), ListedSource(A)
    with structlog.testing.capture_logs() as logs:
        async with discovering(source, engines=engines) as look:
            await look()
            source.now = failure
            for _ in range(3):
                found = await look()
            assert engines.urls() == [A]
            assert list(found.failing()) == ["dns://vllm:8000"]
            source.now = LookFailed("another reason")
            await look()
            source.now = (A,)
            await look()
            assert found.failing() == {}
            source.now = LookFailed("another reason")
            await look()
    first = str(failure) if isinstance(failure, LookFailed) else f"{type(failure).__name__}: {failure}"
    assert [error for _, error in warnings(logs)] == [first, "another reason", "another reason"]
    assert [line["event"] for line in logs].count("engines_source_reads_again") == 1


async def test_a_source_that_fails_does_not_hold_up_another() -> None:
    engines, broken, works = FakeEngines(), ListedSource(), ListedSource(B)
    broken.now = LookFailed("no such name")
    async with discovering(broken, works, engines=engines) as look:
        await look()
        assert engines.urls() == [B]


async def test_a_look_that_hangs_is_one_look_and_the_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.02)
    engines, hangs, works = FakeEngines(), ListedSource(A, name="dns://slow:1"), ListedSource(B)
    hangs.hangs = True
    async with discovering(hangs, works, engines=engines) as look:
        await look()
        found = await look()
        assert (hangs.looks, works.looks, engines.urls()) == (1, 2, [B])
        assert found.failing() == {"dns://slow:1": "no answer within 0.02 s"}


# -- whose engine it is


async def test_an_engine_two_sources_list_stays_while_one_of_them_does() -> None:
    engines = FakeEngines()
    one, other = ListedSource(A, max_inflight=1), ListedSource(A, B, name="file:x", max_inflight=2)
    async with discovering(one, other, engines=engines) as look:
        await look()
        assert {spec.url: spec.max_inflight for spec in engines.added} == {A: 1, B: 2}
        one.now = ()
        await look()
        assert engines.urls() == [A, B]
        other.now = (B,)
        await look()
        assert engines.urls() == [B]


async def test_an_engine_that_was_there_already_is_not_removed() -> None:
    engines, source = FakeEngines(), ListedSource(A, B)
    engines.post("http://10.0.0.1:8000")
    async with discovering(source, engines=engines) as look:
        await look()
        source.now = ()
        await look()
        assert engines.urls() == [A]


async def test_spellings_of_one_address_are_one_engine() -> None:
    engines, source = FakeEngines(), ListedSource("http://10.0.0.1", "http://10.0.0.1:80")
    async with discovering(source, engines=engines) as look:
        await look()
        assert len(engines.members) == 1


@pytest.mark.parametrize("whose", ["ours", "configured"])
async def test_an_engine_an_operator_removed_stays_out_until_it_was_not_listed_once(whose: str) -> None:
    engines, source = FakeEngines(), ListedSource(A, B)
    if whose == "configured":
        engines.post(A)
    async with discovering(source, engines=engines) as look:
        await look()
        engines.drop(A)
        for _ in range(3):
            await look()
        assert engines.urls() == [B]
        source.now = LookFailed("no such name")
        await look()
        source.now = (A, B)
        await look()
        assert engines.urls() == [B], "a look that failed says nothing"
        source.now = (B,)
        await look()
        source.now = (A, B)
        await look()
        assert engines.urls() == [A, B]


async def test_an_engine_that_is_being_removed_by_an_operator_is_not_added_again() -> None:
    engines = FakeEngines()
    engines.empties.clear()
    async with discovering(ListedSource(A), engines=engines) as look:
        await look()
        removal = asyncio.ensure_future(engines.remove("e0", drain_s=60))
        await look()
        engines.empties.set()
        await removal
        await look()
        assert (engines.urls(), len(engines.added)) == ([], 1)


async def test_an_engine_that_was_removed_before_its_first_contact_ended_stays_out() -> None:
    engines = FakeEngines()
    engines.contacts.clear()
    async with discovering(ListedSource(A), engines=engines) as look:
        await look()
        engines.drop(A)
        engines.contacts.set()
        for _ in range(3):
            await look()
        assert (engines.urls(), len(engines.added)) == ([], 1)


async def test_an_engine_an_operator_adds_again_is_the_operators() -> None:
    engines, source = FakeEngines(), ListedSource(A)
    async with discovering(source, engines=engines) as look:
        await look()
        engines.drop(A)
        await look()
        engines.post(A)
        await look()
        source.now = ()
        await look()
        assert engines.urls() == [A]


async def test_an_engine_an_operator_adds_in_the_same_moment_is_the_operators() -> None:
    class Late(FakeEngines):
        async def add(self, spec: EngineSpec, *, resize: bool) -> tuple[FakeMember, bool]:
            self.post(spec.url)
            return await super().add(spec, resize=resize)

    engines, source = Late(), ListedSource(A)
    async with discovering(source, engines=engines) as look:
        await look()
        source.now = ()
        await look()
        assert engines.urls() == [A]


async def test_an_engine_that_is_listed_while_an_operators_removal_drains_is_added_when_it_is_gone() -> None:
    engines, source = FakeEngines(), ListedSource()
    engines.post(A)
    engines.empties.clear()
    removal = asyncio.ensure_future(engines.remove("op0", drain_s=60))
    async with discovering(source, engines=engines) as look:
        await look()
        source.now = (A,)
        await look()
        await look()
        assert engines.added == []
        engines.empties.set()
        await removal
        await look()
        assert (engines.urls(), len(engines.added)) == ([A], 1)


# -- what cannot be added


async def test_a_wrong_engine_is_tried_at_each_look_and_said_once_a_reason() -> None:
    engines = FakeEngines()
    engines.refuse[A] = EngineRefused("it serves another model")
    with structlog.testing.capture_logs() as logs:
        async with discovering(ListedSource(A, B), engines=engines) as look:
            for _ in range(3):
                await look()
            engines.refuse[A] = EngineRefused("it serves nothing")
            await look()
            assert engines.urls() == [B]
            assert len(engines.added) == 5
            del engines.refuse[A]
            await look()
            assert engines.urls() == [A, B]
    assert [error for _, error in warnings(logs)] == ["it serves another model", "it serves nothing"]


async def test_what_there_is_no_room_for_is_added_when_there_is() -> None:
    engines = FakeEngines()
    engines.full = True
    with structlog.testing.capture_logs() as logs:
        async with discovering(ListedSource(A), engines=engines) as look:
            for _ in range(3):
                await look()
            engines.full = False
            await look()
            assert engines.urls() == [A]
    assert warnings(logs) == [("engine_not_added", "there are 3 engines already")]


async def test_a_fault_of_one_engine_is_told_with_its_traceback_and_stops_nothing() -> None:
    engines = FakeEngines()
    engines.refuse[A] = RuntimeError("a fault")  # type: ignore[assignment]  # what nobody expects
    with structlog.testing.capture_logs() as logs:
        async with discovering(ListedSource(A, B), engines=engines) as look:
            await look()
            assert engines.urls() == [B]
    assert [(line["event"], line["exc_info"]) for line in logs if line["log_level"] == "error"] == [
        ("engine_not_added", True)
    ]


async def test_a_fleet_that_ends_is_not_complained_about() -> None:
    engines = FakeEngines()
    engines.refuse[A] = ShuttingDown("the service is ending")
    with structlog.testing.capture_logs() as logs:
        async with discovering(ListedSource(A), engines=engines) as look:
            await look()
    assert warnings(logs) == []


@pytest.mark.parametrize("why", [ShuttingDown("the service is ending"), NotFound("no engine")])
async def test_a_removal_that_is_not_needed_is_not_complained_about(why: Exception) -> None:
    class Ending(FakeEngines):
        async def remove(self, id: str, *, drain_s: float) -> FakeMember:
            assert drain_s == 7
            raise why

    engines, source = Ending(), ListedSource(A)
    with structlog.testing.capture_logs() as logs:
        async with discovering(source, engines=engines) as look:
            await look()
            source.now = ()
            await look()
    assert warnings(logs) == []


# -- nothing waits


async def test_an_engine_that_does_not_answer_holds_up_no_look() -> None:
    engines, source = FakeEngines(), ListedSource(A)
    engines.contacts.clear()
    async with discovering(source, engines=engines) as look:
        await look()
        source.now = (A, B)
        await look()
        assert (engines.urls(), len(engines.added)) == ([A, B], 2)
        source.now = (B,)
        await look()
        assert engines.urls() == [A, B]
        engines.contacts.set()
        await settled()
        await look()
        assert engines.urls() == [B]


async def test_an_engine_that_is_listed_again_while_it_drains_is_added_when_it_is_gone() -> None:
    engines, source = FakeEngines(), ListedSource(A)
    async with discovering(source, engines=engines) as look:
        await look()
        engines.empties.clear()
        source.now = ()
        await look()
        source.now = (A,)
        await look()
        assert [member.leaving for member in engines] == [True]
        engines.empties.set()
        await settled()
        await look()
        assert [(member.engine.id, member.leaving) for member in engines] == [("e1", False)]


async def test_the_start_waits_for_the_first_contacts_and_looks_go_on() -> None:
    engines, source = FakeEngines(), ListedSource(A)
    engines.contacts.clear()
    found = Discovery([source], engines=engines, interval_s=0.01, drain_s=0)
    start = asyncio.ensure_future(found.start())
    await until(lambda: engines.members)
    assert not start.done()
    engines.contacts.set()
    await start
    source.now = (A, B)
    await until(lambda: engines.urls() == [A, B])
    await found.stop()
    looks = source.looks
    await asyncio.sleep(0.05)  # five intervals: time in which nothing must happen
    assert source.looks == looks


@pytest.mark.parametrize("what", ["source", "engine"])
async def test_a_start_is_bounded(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(discovery, "START_S", 0.05)
    engines, source = FakeEngines(), ListedSource(A)
    source.hangs = what == "source"
    engines.contacts.clear()
    found = Discovery([source], engines=engines, interval_s=0.01, drain_s=0)
    with structlog.testing.capture_logs() as logs:
        await asyncio.wait_for(found.start(), 5)
    assert [event for event, _ in warnings(logs)] == ["engines_discovery_is_slow"]
    await asyncio.wait_for(found.stop(), 5)


async def test_without_sources_there_is_nothing_to_do() -> None:
    found = Discovery([], engines=FakeEngines(), interval_s=0.01, drain_s=0)
    await found.start()
    await found.stop()


# -- names


def dns(resolve: Any, url: str = "dns://vllm.svc:8000", **spec: Any) -> Source:
    source = source_of(EngineSpec(url=url, **spec), resolve)
    assert source is not None
    return source


async def test_each_address_of_a_name_is_an_engine_with_what_the_entry_says() -> None:
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["fd00::7", "10.0.0.2", "10.0.0.1", "10.0.0.2"]

    found = await dns(resolve, max_inflight="auto", ceiling=99, api_key="sk").look()
    assert asked == [("vllm.svc", 8000)]
    assert [spec.url for spec in found] == [A, B, "http://[fd00::7]:8000"]
    assert {(spec.max_inflight, spec.ceiling, spec.api_key) for spec in found} == {("auto", 99, "sk")}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "resolved: Name or service not known"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), "Temporary failure"),
        (OSError("no network"), "no network"),
        (UnicodeError("label too long"), "label too long"),
        (TimeoutError(), "TimeoutError"),
        ([], "no address"),
        (["nonsense"], "'nonsense' is no address"),
        (["10.0.0.1", "fe80::1%eth0"], "one network interface"),
        ([f"10.{number >> 8}.{number & 255}.1" for number in range(MAX_LISTED + 1)], f"at most {MAX_LISTED}"),
    ],
)
async def test_a_name_that_cannot_be_used_is_a_look_that_failed(answer: Any, why: str) -> None:
    async def resolve(host: str, port: int) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(LookFailed, match=why):
        await dns(resolve).look()


async def test_the_machines_resolver_is_asked() -> None:
    found = await dns(None, "dns://localhost:8000").look()
    assert {spec.url for spec in found} <= {"http://127.0.0.1:8000", "http://[::1]:8000"}
    assert found
    with pytest.raises(OSError, match=r"."):
        await addresses_of("no-such-engine.invalid", 8000)


def test_an_engine_is_no_source() -> None:
    assert source_of(EngineSpec(url=A)) is None


# -- files


@pytest.fixture
def listing(tmp_path: Path) -> Callable[[str | bytes], Any]:
    """Writes a file of engines, and looks at it."""
    path = tmp_path / "engines.txt"

    async def look(content: str | bytes) -> list[str]:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        source = source_of(EngineSpec(url=f"file:{path}", max_inflight=3))
        assert source is not None
        found = await source.look()
        assert {spec.max_inflight for spec in found} <= {3}
        return [spec.url for spec in found]

    return look


@pytest.mark.parametrize(
    ("content", "urls"),
    [
        (f"{A}\n{B}\n", [A, B]),
        (f"# the fleet\n\n  {A}/  # rack 7\r\n{B}", [A, B]),
        (f"\ufeff{A}\n{A}\nHTTPS://Gpu-1:8443\n".replace("HTTPS", "https"), [A, "https://gpu-1:8443"]),
        ("# none for now\n", []),
        ("http://[::1]:8000", ["http://[::1]:8000"]),
    ],
)
async def test_a_file_lists_an_engine_a_line(listing: Any, content: str, urls: list[str]) -> None:
    assert await listing(content) == urls


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (f"{A}\n\nftp://x\n{B}\n", "line 3: expected an http"),
        (f"{A}\n{B} {C}\n", "line 2: expected a URL of at most"),
        (f"{A}\nhttp://10.0.0.2:80", "line 2: without /v1"),
        (f"{A}\nhttp://user:hunter2@10.0.0.2\n", "line 2: credentials"),
        (f"{A}\ndns://vllm:8000\n", "line 2: expected an http"),
        (f"{A}\n\x00\n", "line 2: expected a URL"),
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"http://\xff\n", "not UTF-8"),
        (b"#" * (MAX_FILE + 1), f"more than {MAX_FILE} bytes"),
        ("\n".join(f"http://h{number}" for number in range(MAX_LISTED + 1)), f"at most {MAX_LISTED}"),
    ],
)
async def test_a_file_with_something_wrong_in_it_is_not_taken_at_all(listing: Any, content: Any, why: str) -> None:
    if why.endswith("/v1"):
        content, why = content + "/v1", "line 2: expected the server's base URL without /v1"
    with pytest.raises(LookFailed, match=why) as caught:
        await listing(content)
    assert "hunter2" not in str(caught.value)


async def test_of_a_file_that_is_too_large_only_the_bound_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engines.txt"
    with path.open("wb") as file:
        file.truncate(64 * MAX_FILE)  # a sparse file: no room is taken on the disk
    tracemalloc.start()
    try:
        with pytest.raises(LookFailed, match="more than"):
            read_engines(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_FILE
    finally:
        tracemalloc.stop()


async def test_what_is_no_file_is_said_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("missing", "cannot be read: No such file"), (".", "is no file"), ("pipe", "is no file")):
        source = source_of(EngineSpec(url=f"file:{tmp_path / name}"))
        assert source is not None
        with pytest.raises(LookFailed, match=why):
            await asyncio.wait_for(source.look(), 5)


# -- a real fleet


async def test_a_fleet_follows_a_file_and_what_runs_on_a_removed_engine_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "engines.txt"
    async with ScriptedEngine() as first, ScriptedEngine() as second, fleet_of() as fleet:
        source = source_of(EngineSpec(url=f"file:{path}", max_inflight=5))
        assert source is not None
        found = Discovery([source], engines=fleet._members, interval_s=0.02, drain_s=60)
        await found.start()
        assert fleet.describe() == []
        assert "No such file" in found.failing()[source.name]
        path.write_text(f"{first.url}\n")
        await until(lambda: [engine["healthy"] for engine in fleet.describe()] == [True])
        assert fleet.describe()[0]["max_inflight"] == 5
        first.script, answer = hold()
        running = asyncio.ensure_future(generate(fleet))
        await first.wait_asked(1)
        staged = tmp_path / "staged"
        staged.write_text(f"{second.url}\n")
        staged.rename(path)
        await until(lambda: {e["url"]: e["leaving"] for e in fleet.describe()} == {first.url: True, second.url: False})
        answer.set_result(Reply())
        assert (await running).attempts == 1
        await until(lambda: [engine["url"] for engine in fleet.describe()] == [second.url])
        await fleet.remove_engine(fleet.describe()[0]["id"], drain_s=0)
        await found.look()
        await found.look()
        assert fleet.describe() == []
        await found.stop()


async def test_a_wrong_engine_of_a_file_stops_nothing_and_is_used_once_it_is_right(tmp_path: Path) -> None:
    path = tmp_path / "engines.txt"
    async with ScriptedEngine() as right, ScriptedEngine() as wrong, fleet_of() as fleet:
        models, wrong.models = wrong.models, {"data": []}
        path.write_text(f"{right.url}\n{wrong.url}\n")
        source = source_of(EngineSpec(url=f"file:{path}"))
        assert source is not None
        found = Discovery([source], engines=fleet._members, interval_s=0.02, drain_s=60)
        await found.start()
        assert [engine["url"] for engine in fleet.describe() if engine["healthy"]] == [right.url]
        wrong.models = models
        await until(lambda: sum(engine["healthy"] for engine in fleet.describe()) == 2)
        await found.stop()
