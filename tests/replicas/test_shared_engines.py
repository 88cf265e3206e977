"""Engines that are added and removed at one replica come and go at all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_service.core.shared import EngineWish
from rollout_service.engines.fleet import id_by_address
from rollout_service.errors import Conflict, EngineNotAllowed, EngineRefused, NotFound, StoreUnavailable
from rollout_service.replicas import engines as shared_engines
from rollout_service.replicas.engines import FORGET_S, SharedEngines
from rollout_service.settings.tables import Inflight
from rollout_service.store.shared_memory import SharedMemory, SharedMemoryStore
from tests.fakes import Clock, passes, until
from tests.replicas.world import World

ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@dataclass
class Fleet:
    """Engines by URL -> requests at once; what a fleet promises of them, and nothing else."""

    there: dict[str, Inflight | None] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    all_read: bool = True
    """Else more may be named."""
    wrong: dict[str, str] = field(default_factory=dict)
    """Refused, and why."""
    leaving: dict[str, asyncio.Event] = field(default_factory=dict)
    contacting: dict[str, asyncio.Event] = field(default_factory=dict)
    """Adding waits for it."""
    nothing_else: bool = False
    """Only what is named may come back, and who follows may resize it."""
    most: int = 64
    holding: bool = False
    """What leaves stays until its event is set."""
    drains: list[tuple[str, float]] = field(default_factory=list)
    adds: list[tuple[str, Inflight | None]] = field(default_factory=list)

    def describe(self) -> list[dict[str, Any]]:
        return [self._described(url) for url in self.there]

    def _described(self, url: str) -> dict[str, Any]:
        return {
            "id": id_by_address(url),
            "url": url,
            "max_inflight": self.there.get(url),
            "leaving": url in self.leaving,
        }

    def names(self, url: str) -> bool | None:
        return True if url in self.named else False if self.all_read else None

    async def add_engine(
        self, url: str, max_inflight: Inflight | None = None, *, follows: bool = False
    ) -> tuple[dict[str, Any], bool]:
        self.adds.append((url, max_inflight))
        if url in self.leaving:
            raise Conflict("being removed")
        if self.nothing_else and not (url in self.named and (follows or url not in self.there)):
            raise EngineNotAllowed("no pattern")
        new = url not in self.there
        if new or max_inflight is not None:
            self.there[url] = max_inflight
        if new and url in self.contacting:
            await self.contacting[url].wait()
            if url not in self.there:
                raise Conflict("removed before its first contact ended")
        if url in self.wrong:
            del self.there[url]
            raise EngineRefused(self.wrong[url])
        return self._described(url), new

    async def remove_engine(self, id: str, *, drain_s: float) -> dict[str, Any]:
        url = next((url for url in self.there if id_by_address(url) == id), None)
        if url is None:
            raise NotFound("no such engine")
        gone = self.leaving.setdefault(url, asyncio.Event())
        self.drains.append((url, drain_s))
        if not self.holding:
            gone.set()
        await gone.wait()
        described = self._described(url)
        self.there.pop(url, None)
        self.leaving.pop(url, None)
        return described


@dataclass
class Replica:
    fleet: Fleet
    store: SharedMemoryStore
    engines: SharedEngines


class Run:
    """Replicas that hear of each other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.memory = SharedMemory(1, self.clock)
        self.replicas: list[Replica] = []

    async def join(self, **fleet: Any) -> Replica:
        store = self.memory.store()
        await store.open()
        replica = Replica(there := Fleet(**fleet), store, SharedEngines(store, there))
        store.watch(lambda _: replica.engines.heard())
        self.replicas.append(replica)
        await replica.engines.start()
        return replica


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    run = Run()
    yield run
    for replica in run.replicas:
        await replica.engines.stop()
        await replica.store.close()


async def test_an_engine_added_at_one_is_added_at_all_with_its_size(run: Run):
    one, two = await run.join(), await run.join(there={TWO: 4})
    description, new = await one.engines.add_engine(ONE, 7)
    assert (description["url"], description["max_inflight"], new) == (ONE, 7, True)
    await until(lambda: two.fleet.there == {TWO: 4, ONE: 7})
    assert one.fleet.there == {ONE: 7}
    _, new = await two.engines.add_engine(ONE, "auto")
    assert not new
    await until(lambda: one.fleet.there == {ONE: "auto"})
    await two.engines.add_engine(ONE)
    await passes()
    assert (one.fleet.there[ONE], two.fleet.there[ONE]) == ("auto", "auto")


async def test_a_wish_is_followed_once(run: Run):
    """What "auto" has found since is not thrown away by the next look."""
    one, two = await run.join(), await run.join()
    await one.engines.add_engine(ONE, "auto")
    await until(lambda: ONE in two.fleet.there)
    for replica in (one, two):
        await passes()
        before = list(replica.fleet.adds)
        await replica.engines.look()
        await passes()
        assert replica.fleet.adds == before


async def test_a_shorter_drain_that_is_asked_for_later_is_followed_too(run: Run):
    one, two = await run.join(there={ONE: 1}, holding=True), await run.join(there={ONE: 1}, holding=True)
    removals = [asyncio.create_task(one.engines.remove_engine(id_by_address(ONE), drain_s=3600))]
    await until(lambda: ONE in two.fleet.leaving)
    for replica in (one, two):
        await replica.engines.look()
        assert replica.fleet.drains == [(ONE, 3600)], "asked for once"
    removals.append(asyncio.create_task(two.engines.remove_engine(id_by_address(ONE), drain_s=0)))
    await until(lambda: one.fleet.drains == two.fleet.drains == [(ONE, 3600), (ONE, 0)])
    for replica in (one, two):
        replica.fleet.leaving[ONE].set()
    assert [answer["url"] for answer in await asyncio.gather(*removals)] == [ONE, ONE]


async def test_one_that_is_gone_from_here_can_be_removed_sooner_elsewhere(run: Run):
    one, two = await run.join(there={ONE: 1}), await run.join(there={ONE: 1}, holding=True)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=3600)
    await until(lambda: ONE in two.fleet.leaving)
    for _ in range(3):
        run.clock.now += FORGET_S + 1
        await two.engines.look()
        await one.engines.look()
    assert await one.engines.remove_engine(id_by_address(ONE), drain_s=0) == {"id": id_by_address(ONE), "url": ONE}
    await until(lambda: two.fleet.drains == [(ONE, 3600), (ONE, 0)])
    two.fleet.leaving[ONE].set()


async def test_one_that_is_wanted_back_while_a_call_here_drains_it_comes_back_at_once(run: Run):
    one, two = await run.join(there={ONE: 1}, holding=True), await run.join()
    removal = asyncio.create_task(one.engines.remove_engine(id_by_address(ONE), drain_s=60))
    await until(lambda: ONE in one.fleet.leaving)
    await two.engines.add_engine(ONE, 5)
    await passes()
    one.fleet.leaving[ONE].set()
    await removal
    await until(lambda: one.fleet.there == {ONE: 5}, within_s=shared_engines.LOOK_S / 2)


async def test_one_that_is_named_comes_back_with_a_size_where_nothing_else_may_be_added(run: Run):
    one, two = await run.join(there={ONE: 1}, named={ONE}, nothing_else=True), await run.join(nothing_else=True)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    assert (await one.engines.add_engine(ONE, 5))[0]["max_inflight"] == 5
    assert one.fleet.there == {ONE: 5}
    with pytest.raises(EngineNotAllowed):
        await one.engines.add_engine(TWO)
    assert not two.fleet.there


async def test_a_size_that_cannot_be_written_down_is_not_taken(run: Run):
    one = await run.join(there={ONE: 1, TWO: 2})
    await one.engines.add_engine(ONE, 4)
    run.memory.broken = "no space left"
    for url in (ONE, TWO):
        with pytest.raises(StoreUnavailable):
            await one.engines.add_engine(url, 9)
    run.memory.broken = None
    await one.engines.look()
    await passes()
    assert one.fleet.there == {ONE: 4, TWO: 2}


async def test_one_that_could_not_be_written_down_leaves_though_some_list_was_not_read_yet(run: Run):
    one = await run.join(all_read=False)
    run.memory.broken = "no space left"
    with pytest.raises(StoreUnavailable):
        await one.engines.add_engine(ONE)
    run.memory.broken = None
    await one.engines.look()
    await until(lambda: not one.fleet.there)
    assert len(await one.store.wishes()) == 0


async def test_a_removal_is_not_forgotten_while_some_list_was_not_read_yet(run: Run):
    one = await run.join(there={ONE: 1}, all_read=False)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    for _ in range(3):
        run.clock.now += FORGET_S + 1
        await one.engines.look()
    assert len(await one.store.wishes()) == 1


async def test_a_caller_that_is_gone_before_the_first_contact_ended_leaves_nothing(run: Run):
    one = await run.join(contacting={ONE: asyncio.Event()})
    adding = asyncio.create_task(one.engines.add_engine(ONE))
    await until(lambda: ONE in one.fleet.there)
    adding.cancel()
    await asyncio.wait([adding])
    one.fleet.contacting[ONE].set()
    await until(lambda: not one.fleet.there, within_s=shared_engines.LOOK_S / 2)


async def test_a_call_that_overtakes_what_a_look_began_has_the_last_word(run: Run):
    one = await run.join(there={ONE: 1})
    two = await run.join()
    two.store.pushes = one.store.pushes = False
    await two.engines.add_engine(ONE, 5)
    await one.engines.look()  # begun, and not one step of it done
    assert one.fleet.there == {ONE: 1}
    await one.engines.add_engine(ONE, 9)
    await one.engines.look()
    await until(lambda: one.fleet.there == {ONE: 9})


async def test_one_that_nobody_could_add_can_be_removed(run: Run):
    one = await run.join()
    await one.engines.add_engine(ONE)
    two = await run.join(wrong={ONE: "serves another model by now"})
    assert not two.fleet.there
    await two.engines.remove_engine(id_by_address(ONE), drain_s=0)
    await until(lambda: not one.fleet.there)
    adds = len(two.fleet.adds)
    await two.engines.look()
    assert len(two.fleet.adds) == adds


async def test_one_that_is_wanted_back_while_it_leaves_comes_back_when_it_is_gone(run: Run):
    one, two = await run.join(there={ONE: 1}), await run.join(there={ONE: 1}, holding=True)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=60)
    await until(lambda: ONE in two.fleet.leaving)
    with capture_logs() as logs:
        await one.engines.add_engine(ONE, 5)
        await two.engines.look()
        two.fleet.leaving[ONE].set()
        await until(lambda: two.fleet.there == {ONE: 5})
    assert not [entry for entry in logs if entry["event"] == "engine_not_added"]


async def test_an_engine_removed_at_one_leaves_all_with_the_same_drain(run: Run):
    one, two = await run.join(there={ONE: 1}, holding=True), await run.join(there={ONE: 1, TWO: 1})
    removal = asyncio.create_task(one.engines.remove_engine(id_by_address(ONE), drain_s=2.5))
    await until(lambda: two.fleet.there == {TWO: 1})
    assert (one.fleet.drains, two.fleet.drains) == ([(ONE, 2.5)], [(ONE, 2.5)])
    assert not removal.done(), "not gone from here"
    one.fleet.leaving[ONE].set()
    assert (await removal)["url"] == ONE
    assert one.fleet.there == {}


async def test_one_that_starts_later_has_the_same_engines(run: Run):
    one = await run.join(there={ONE: 1})
    await one.engines.add_engine(TWO, 9)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    two = await run.join(there={ONE: 1}, named={ONE})
    assert two.fleet.there == {TWO: 9}


async def test_a_start_does_not_wait_for_ever_for_an_engine(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_engines, "START_S", 0.05)
    one = await run.join()
    await one.engines.add_engine(ONE)
    async with asyncio.timeout(5):
        two = await run.join(contacting={ONE: asyncio.Event()})
    two.fleet.contacting[ONE].set()
    await until(lambda: two.fleet.there == {ONE: None})


async def test_one_that_was_removed_stays_out_wherever_it_is_named_until_it_is_added(run: Run):
    one, two = await run.join(there={ONE: 1}, named={ONE}), await run.join(there={ONE: 1})
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    assert one.engines.keeps_out(ONE)
    await until(lambda: not two.fleet.there and two.engines.keeps_out(ONE))
    two.fleet.there[ONE] = 1  # found where engines are listed
    await two.engines.look()
    await until(lambda: not two.fleet.there)
    for _ in range(5):  # as long as one of them finds it named, and however often the other does not
        run.clock.now += FORGET_S / 2
        await one.engines.look()
        await two.engines.look()
    assert len(await two.store.wishes()) == 1
    late = await run.join(there={ONE: 1})
    await until(lambda: not late.fleet.there)
    await two.engines.add_engine(ONE)
    assert not two.engines.keeps_out(ONE)
    await until(lambda: ONE in one.fleet.there and ONE in late.fleet.there)
    await two.engines.look()
    await passes()
    assert ONE in two.fleet.there


async def test_what_stays_out_is_known_before_the_fleet_starts(run: Run):
    one = await run.join(there={ONE: 1, TWO: 1})
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    store = run.memory.store()
    await store.open()
    engines = SharedEngines(store, Fleet())
    await engines.read()
    assert [engines.keeps_out(url) for url in (ONE, "http://10.0.0.1:8000/", TWO)] == [True, True, False]
    await store.close()


async def test_a_removal_is_forgotten_once_nothing_names_the_engine_and_everybody_has_seen_it(run: Run):
    one, two = await run.join(there={ONE: 1}, named={ONE}), await run.join()
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    run.clock.now += 2 * FORGET_S
    await one.engines.look()
    assert len(await one.store.wishes()) == 1, "it is still named here"
    one.fleet.named.clear()
    await two.engines.look()
    await one.engines.look()
    assert len(await one.store.wishes()) == 1, "it was named a moment ago"
    run.clock.now += 2 * FORGET_S
    await two.engines.look()
    assert len(await one.store.wishes()) == 0
    await one.engines.look()
    assert not one.engines.keeps_out(ONE)
    two.fleet.there[ONE] = 1  # another engine at the same address
    await two.engines.look()
    await passes()
    assert ONE in two.fleet.there

    await two.engines.remove_engine(id_by_address(ONE), drain_s=0)
    run.clock.now += FORGET_S / 2
    await two.engines.look()
    assert len(await two.store.wishes()) == 1, "somebody may not have seen it yet"


async def test_signals_that_are_lost_cost_a_few_seconds(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_engines, "LOOK_S", 0.05)
    one, two = await run.join(), await run.join()
    two.store.pushes = False
    await one.engines.add_engine(ONE)
    await until(lambda: ONE in two.fleet.there)


async def test_one_that_a_replica_refuses_is_tried_again_and_told_once(run: Run):
    one, two = await run.join(), await run.join(wrong={ONE: "serves another model"})
    with capture_logs() as logs:
        await one.engines.add_engine(ONE)
        await passes()
        for _ in range(3):
            await two.engines.look()
            await passes()
    told = [entry for entry in logs if entry["event"] == "engine_not_added"]
    assert [(entry["engine"], entry["error"]) for entry in told] == [(ONE, "serves another model")]
    assert two.fleet.there == {}
    del two.fleet.wrong[ONE]
    await two.engines.look()
    await until(lambda: ONE in two.fleet.there)


async def test_an_engine_that_is_refused_is_wanted_by_nobody(run: Run):
    one = await run.join(wrong={ONE: "serves another model"})
    with pytest.raises(EngineRefused):
        await one.engines.add_engine(ONE)
    with pytest.raises(NotFound, match="no engine 'e-0'"):
        await one.engines.remove_engine("e-0", drain_s=0)
    assert not one.fleet.there
    assert len(await one.store.wishes()) == 0


async def test_what_cannot_be_written_down_is_refused_and_undone(run: Run):
    one, two = await run.join(there={TWO: 1}), await run.join(there={TWO: 1})
    run.memory.broken = "no space left"
    with pytest.raises(StoreUnavailable):
        await one.engines.add_engine(ONE)
    with pytest.raises(StoreUnavailable):
        await one.engines.remove_engine(id_by_address(TWO), drain_s=0)
    run.memory.broken = None
    await one.engines.look()
    await until(lambda: one.fleet.there == {TWO: 1})
    assert two.fleet.there == {TWO: 1}


async def test_an_answer_that_is_lost_leaves_what_was_written_down(run: Run):
    one, two = await run.join(), await run.join()
    one.store.lost_answers = 1
    with pytest.raises(StoreUnavailable):
        await one.engines.add_engine(ONE)
    await one.engines.look()
    await until(lambda: ONE in two.fleet.there)
    assert ONE in one.fleet.there


async def test_one_that_is_named_by_now_is_not_undone(run: Run):
    one = await run.join()
    run.memory.broken = "no space left"
    with pytest.raises(StoreUnavailable):
        await one.engines.add_engine(ONE)
    one.fleet.named.add(ONE)
    run.memory.broken = None
    await one.engines.look()
    await passes()
    assert ONE in one.fleet.there


async def test_a_look_that_was_begun_before_a_call_does_not_undo_it(run: Run, monkeypatch: pytest.MonkeyPatch):
    one = await run.join(there={ONE: 1})
    await one.engines.add_engine(ONE, 4)
    read, hold = one.store.wishes, asyncio.Event()

    async def slow() -> Any:
        found = await read()
        await hold.wait()
        return found

    monkeypatch.setattr(one.store, "wishes", slow)
    look = asyncio.create_task(one.engines.look())
    await passes()
    monkeypatch.setattr(one.store, "wishes", read)
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    await one.engines.add_engine(TWO)
    hold.set()
    await look
    assert one.engines.keeps_out(ONE)
    await passes()
    assert one.fleet.there == {TWO: None}
    assert one.fleet.adds == [(ONE, None), (ONE, 4), (TWO, None)]


async def test_of_sizes_asked_for_together_all_have_the_one_that_was_written_last(run: Run):
    one, two = await run.join(), await run.join()
    await one.engines.add_engine(ONE, 1)
    await asyncio.gather(*(replica.engines.add_engine(ONE, size) for size in (5, 9, 3) for replica in (one, two)))
    (last,) = await one.store.wishes()
    await until(lambda: one.fleet.there == two.fleet.there == {ONE: last.max_inflight})
    three = await run.join()
    await three.fleet.add_engine(TWO)  # known here only, and asked for by another before it has followed
    await one.engines.add_engine(TWO, 7)
    await three.engines.add_engine(TWO)
    await until(lambda: three.fleet.there[TWO] == one.fleet.there[TWO] == 7)


async def test_sizes_that_are_taken_in_another_order_than_they_were_written(run: Run, monkeypatch: pytest.MonkeyPatch):
    one, two = await run.join(), await run.join()
    await one.engines.add_engine(ONE, 1)
    write, hold = one.store.wish, asyncio.Event()

    async def slow(wish: EngineWish, **room: Any) -> EngineWish:
        kept = await write(wish, **room)
        await hold.wait()
        return kept

    monkeypatch.setattr(one.store, "wish", slow)
    first = asyncio.create_task(one.engines.add_engine(ONE, 5))
    await until(lambda: two.fleet.there.get(ONE) == 5)
    monkeypatch.setattr(one.store, "wish", write)
    await one.engines.add_engine(ONE, 9)
    hold.set()
    await first
    await until(lambda: one.fleet.there == two.fleet.there == {ONE: 9})


async def test_what_is_asked_for_elsewhere_during_a_call_that_fails_is_followed_at_once(run: Run):
    contact = asyncio.Event()
    one, two = await run.join(contacting={ONE: contact}, wrong={ONE: "starts"}), await run.join()
    adding = asyncio.create_task(one.engines.add_engine(ONE))
    await until(lambda: ONE in one.fleet.there)
    await two.engines.add_engine(ONE, 5)
    await passes()
    contact.set()
    with pytest.raises(EngineRefused):
        await adding
    del one.fleet.wrong[ONE]
    await until(lambda: one.fleet.there == {ONE: 5}, within_s=shared_engines.LOOK_S / 2)


async def test_one_that_is_removed_during_its_first_contact_is_no_warning(run: Run):
    one, two = await run.join(), await run.join(contacting={ONE: asyncio.Event()})
    with capture_logs() as logs:
        await one.engines.add_engine(ONE)
        await until(lambda: ONE in two.fleet.there)
        await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
        await until(lambda: not two.fleet.there)
        two.fleet.contacting[ONE].set()
        await passes()
    assert not [entry for entry in logs if entry["event"] == "engine_not_added"]


async def test_two_that_take_the_last_place_at_different_replicas_do_not_both_get_it(run: Run):
    one = await run.join(there={"http://named": 1}, most=2)
    two = await run.join(there={"http://named": 1}, most=2)
    await one.engines.add_engine("http://named")  # counted once, though it is asked for, too
    answers = await asyncio.gather(one.engines.add_engine(ONE), two.engines.add_engine(TWO), return_exceptions=True)
    (refused,) = [answer for answer in answers if isinstance(answer, Conflict)]
    assert str(refused) == (
        "with those asked for at other replicas there would be 3 engines, and registration.max_engines is 2"
    )
    await until(lambda: one.fleet.there == two.fleet.there, within_s=shared_engines.LOOK_S / 2)
    assert len(one.fleet.there) == 2


async def test_a_look_does_not_undo_a_call_that_is_under_way(run: Run):
    one, two = await run.join(there={ONE: 1}), await run.join(there={ONE: 1})
    await one.engines.remove_engine(id_by_address(ONE), drain_s=0)
    await until(lambda: not two.fleet.there)
    contact = one.fleet.contacting[ONE] = asyncio.Event()
    adding = asyncio.create_task(one.engines.add_engine(ONE))
    await until(lambda: ONE in one.fleet.there)
    await one.engines.look()
    await passes()
    assert one.fleet.drains == [(ONE, 0)]
    contact.set()
    await adding
    await until(lambda: ONE in two.fleet.there)
    await one.engines.look()
    await passes()
    assert ONE in one.fleet.there


async def test_the_last_of_two_callers_is_followed_by_all(run: Run):
    one, two = await run.join(there={ONE: 1}), await run.join(there={ONE: 1})
    await asyncio.gather(
        one.engines.remove_engine(id_by_address(ONE), drain_s=0), two.engines.add_engine(ONE, 3), return_exceptions=True
    )
    (last,) = await one.store.wishes()
    await until(lambda: (ONE in one.fleet.there) == (ONE in two.fleet.there) == last.wanted)
    await one.engines.add_engine(ONE, 5)
    await until(lambda: one.fleet.there == two.fleet.there == {ONE: 5})


async def test_another_spelling_is_the_same_engine(run: Run):
    one, two = await run.join(there={"http://ENGINE:80/": 1}), await run.join(there={"http://engine": 1})
    await one.engines.remove_engine(id_by_address("http://engine/"), drain_s=0)
    await until(lambda: not two.fleet.there)
    assert [wish.url for wish in await one.store.wishes()] == ["http://engine"]


async def test_what_is_under_way_ends_with_the_replica(run: Run):
    one, two = await run.join(), await run.join(contacting={ONE: asyncio.Event()})
    await one.engines.add_engine(ONE)
    await until(lambda: ONE in two.fleet.there)
    async with asyncio.timeout(5):
        await two.engines.stop()


@asynccontextmanager
async def joined(world: World, fleet: Fleet) -> AsyncIterator[SharedEngines]:
    door = (await world.join(fleet=fleet)).door
    assert door.shared_engines is not None
    yield door.shared_engines


async def test_replicas_follow_each_other_from_their_start_to_their_end():
    one, two = Fleet(), Fleet()
    async with World() as world, joined(world, one) as calls, joined(world, two):
        await calls.add_engine(ONE, 2)
        await until(lambda: two.there == {ONE: 2})
        world.memory.broken = "gone"
        await passes()
        world.memory.broken = None
        await calls.remove_engine(id_by_address(ONE), drain_s=0)
        await until(lambda: two.there == {})
