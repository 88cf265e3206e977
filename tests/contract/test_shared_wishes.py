"""What operators asked for at engines, in the store replicas share. Each test is one sentence of store/shared.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout_service.core.shared import EngineWish
from rollout_service.errors import Conflict
from rollout_service.store.shared import SharedStore, Signal
from tests.contract.shared_stores import WAIT_S

AGE_S = 0.2
ONE, TWO = "http://10.0.0.1:8000", "https://engines.example/two"


def added(url: str, max_inflight: int | str | None = None) -> EngineWish:
    return EngineWish(engine_id=f"e-{url}", url=url, wanted=True, max_inflight=max_inflight)


def removed(url: str, drain_s: float = 30.0) -> EngineWish:
    return EngineWish(engine_id=f"e-{url}", url=url, wanted=False, drain_s=drain_s)


async def test_wishes_are_kept_with_numbers_that_rise_and_seen_by_everyone(
    store: SharedStore, other: SharedStore
) -> None:
    assert list(await store.wishes()) == []
    first = await store.wish(added(ONE, 7))
    second = await other.wish(added(TWO, "auto"))
    assert (first, second) == (
        replace(added(ONE, 7), number=first.number),
        replace(added(TWO, "auto"), number=second.number),
    )
    assert 0 < first.number < second.number
    assert list(await store.wishes()) == list(await other.wishes()) == [first, second]


async def test_the_last_wish_of_an_engine_stands_in_place_of_the_earlier_one(
    store: SharedStore, other: SharedStore
) -> None:
    await store.wish(added(ONE))
    two = await store.wish(added(TWO))
    gone = await other.wish(removed(ONE, 2.5))
    assert list(await store.wishes()) == [two, gone]
    assert gone == replace(removed(ONE, 2.5), number=gone.number)
    back = await store.wish(added(ONE))
    assert list(await store.wishes()) == [two, back]
    assert back.number > gone.number > two.number


async def test_a_wish_without_a_size_keeps_the_size_while_the_engine_is_wanted(store: SharedStore) -> None:
    await store.wish(added(ONE, 7))
    assert (await store.wish(added(ONE))).max_inflight == 7
    assert (await store.wish(added(ONE, "auto"))).max_inflight == "auto"
    assert (await store.wish(removed(ONE))).max_inflight is None
    assert (await store.wish(added(ONE))).max_inflight is None


async def test_only_an_old_removal_that_is_the_last_word_is_forgotten(store: SharedStore) -> None:
    wanted, gone = await store.wish(added(ONE)), await store.wish(removed(TWO))
    await store.forget_removal(wanted.number, after_s=-1)
    await store.forget_removal(gone.number, after_s=60)
    assert list(await store.wishes()) == [wanted, gone]
    again = await store.wish(removed(TWO))
    await store.forget_removal(gone.number, after_s=-1)
    assert list(await store.wishes()) == [wanted, again]
    await store.forget_removal(again.number, after_s=-1)
    await store.forget_removal(again.number, after_s=-1)
    assert list(await store.wishes()) == [wanted]
    assert (await store.wish(added(TWO))).number > again.number


async def test_a_removal_that_is_remembered_is_as_new(store: SharedStore, other: SharedStore) -> None:
    async def now() -> float:
        return (await store.overview()).now

    for _ in range(20):
        wanted, gone = await store.wish(added(ONE)), await store.wish(removed(TWO))
        asked = await now()
        while (begun := await now()) - asked <= AGE_S:
            await asyncio.sleep(0.01)  # time passes by the store's clock
        await other.remember_removal(gone.number)
        await other.remember_removal(wanted.number)
        await store.forget_removal(gone.number, after_s=AGE_S)
        if await now() - begun < AGE_S:
            break  # else it was old again by then: once more
    assert list(await store.wishes()) == [wanted, gone]
    while await now() - begun <= 2 * AGE_S:
        await asyncio.sleep(0.01)  # as above
    await store.forget_removal(gone.number, after_s=AGE_S)
    assert list(await store.wishes()) == [wanted]


async def test_no_more_engines_are_wanted_than_there_may_be(store: SharedStore, other: SharedStore) -> None:
    one = await store.wish(added(ONE), beside=["e-configured"], most=2)
    with pytest.raises(Conflict, match=r"there would be 3 engines, and registration\.max_engines is 2"):
        await other.wish(added(TWO), beside=["e-configured"], most=2)
    assert list(await store.wishes()) == [one]
    for again in (added(ONE, 5), removed(ONE)):
        one = await other.wish(again, beside=["e-configured", one.engine_id], most=2)
        assert list(await store.wishes()) == [one]
    await store.wish(added(TWO), beside=["e-configured"], most=2)
    # Where there are too many already, those that are there may have another size.
    assert (await store.wish(added(TWO, 9), beside=["e-configured", "e-other"], most=2)).max_inflight == 9
    there = EngineWish(engine_id="e-other", url="http://other", wanted=True, max_inflight=3)
    assert (await store.wish(there, beside=["e-configured", "e-other"], most=2)).max_inflight == 3


async def test_everybody_hears_of_a_wish(store: SharedStore, other: SharedStore) -> None:
    heard: dict[str, asyncio.Event] = {"store": asyncio.Event(), "other": asyncio.Event()}
    store.watch(lambda signal: heard["store"].set() if signal is Signal.ENGINES else None)
    other.watch(lambda signal: heard["other"].set() if signal is Signal.ENGINES else None)
    await other.wish(added(ONE))
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(event.wait() for event in heard.values()))


async def test_wishes_made_together_all_have_numbers_of_their_own(store: SharedStore, other: SharedStore) -> None:
    count = 8
    made = await asyncio.gather(
        *((store, other)[n % 2].wish(added(ONE if n < count // 2 else TWO)) for n in range(count))
    )
    assert len({wish.number for wish in made}) == count
    kept = await store.wishes()
    assert {wish.url: wish.number for wish in kept} == {
        url: max(wish.number for wish in made if wish.url == url) for url in (ONE, TWO)
    }
