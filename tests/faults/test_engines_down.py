"""An engine that is down is not a failed rollout; work waits for it, goes elsewhere, or is said aloud."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import free_port, prompt, until

FAILED = "rollout_failed_total"


async def test_an_engine_that_is_down_at_the_start_is_waited_for(engine: Engine, service: MakeService) -> None:
    await engine.stop()
    live = await service()
    assert await live.probe("/readyz") == 503
    (group_id,) = await live.submit(prompt("A"))
    assert await live.state(group_id) == "pending"
    await engine.start()
    await live.collect(1)
    await live.wait_ready()
    assert await live.metric(FAILED) == 0


async def test_an_engine_that_dies_and_comes_back_on_its_port_costs_no_rollout(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 37: with one attempt each, so that only uncounted tries can have saved them."""
    engine.on("p:A", lambda a: Act(hold=a.nth < 4))
    live = await service(dispatch={"max_attempts": 1})
    groups = await live.submit(*(prompt(f"A{number}") for number in range(4)))
    for round_ in range(2):
        await engine.holding(16 if round_ == 0 else 4)
        await engine.stop()
        await until(lambda: _is(live.probe("/readyz"), 503))
        if round_ == 0:
            assert await live.slots_used() == 16, "they wait, and keep their slots"
        await engine.start()
        assert len(await live.collect(4 if round_ == 0 else 1)) >= 1
        if round_ == 0:
            engine.on("p:B;", lambda a: Act(hold=a.nth < 4))
            await live.submit(prompt("B"))
    assert await live.metric(FAILED) == 0
    assert (await live.counts())["acked"] == len(groups) + 1
    assert await live.slots_used() == 0


async def test_a_sick_engine_that_answers_502_to_everything_is_waited_for_too(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    engine.down_status = 502
    await until(lambda: _is(live.probe("/readyz"), 503))
    await live.submit(prompt("A"))
    engine.down_status = None
    await live.collect(1)
    assert await live.metric(FAILED) == 0


async def test_no_engine_for_engine_wait_s_is_said_aloud_and_resume_goes_on(
    engine: Engine, service: MakeService
) -> None:
    """Public faults 1 and 29: neither a silent wait nor permits parked for ever."""
    live = await service(dispatch={"engine_wait_s": 1.0})
    await engine.stop()
    await until(lambda: _is(live.probe("/readyz"), 503))
    groups = await live.submit(*(prompt(f"A{number}") for number in range(3)))
    answer = await live.lease(wait_s=30)
    assert answer.status_code == 503
    assert "1 s" in answer.json()["detail"]
    counts = await live.counts()
    assert (counts["failed"], counts["pending"]) == (1, 2), "the halt costs one prompt"
    assert await live.metric(FAILED, 'reason="engine_unavailable"') == 4
    await engine.start()
    await live.http.post("/resume")
    assert {group["group_id"] for group in await live.collect(2)} == set(groups[1:])


async def test_work_in_flight_when_the_last_engine_is_lost_for_good_fails_with_the_reason(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(dispatch={"engine_wait_s": 1.0})
    (group_id,) = await live.submit(prompt("A"))
    await engine.holding(4)
    await engine.stop()
    group = await live.wait_state(group_id, "failed")
    assert "no healthy engine" in group["error"]
    assert await live.metric(FAILED, 'reason="engine_unavailable"') == 4
    assert await live.slots_used() == 0
    await engine.start()


async def test_a_bump_while_work_waits_for_an_engine_cancels_it(engine: Engine, service: MakeService) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    (group_id,) = await live.submit(prompt("A"))
    await engine.holding(4)
    await engine.stop()
    await until(lambda: _is(live.probe("/readyz"), 503))
    assert (await live.bump(1))["stale_groups"] == 1
    assert await live.state(group_id) == "stale"
    assert await live.slots_used() == 0
    await engine.start()
    await live.submit(prompt("B"))
    assert len(await live.collect(1)) == 1
    assert len(engine.find("p:A;")) == 4


async def test_an_engine_that_fails_fast_does_not_swallow_the_work(service: MakeService, make_engine: Any) -> None:
    """Public fault 37: least-loaded routing likes whoever fails fastest."""
    good, bad = await make_engine(), await make_engine()
    good.on(None, Act(delay=0.05))
    bad.on(None, Act(status=502, message="instant"))
    live = await service([good.url, bad.url], dispatch={"max_attempts": 3})
    await live.submit(*(prompt(f"A{number}") for number in range(25)))
    assert len(await live.collect(25)) == 25
    assert await live.metric(FAILED) == 0
    assert len(bad.attempts) < 100, "its health is fine, and yet it gets little"


async def test_a_retry_goes_to_another_engine_and_one_that_is_killed_leaves_the_other_working(
    service: MakeService, make_engine: Any
) -> None:
    one, two = await make_engine(), await make_engine()
    one.on(None, Act(hold=True))
    live = await service([one.url, two.url], dispatch={"max_attempts": 2})
    await live.submit(*(prompt(f"A{number}") for number in range(8)))
    await until(lambda: len(one.in_flight()) >= 8)
    await one.stop()
    assert len(await live.collect(8)) == 8
    assert await live.metric(FAILED) == 0
    assert await live.probe("/readyz") == 200
    engines = {entry["url"]: entry["healthy"] for entry in (await live.http.get("/engines")).json()["engines"]}
    assert engines == {one.url: False, two.url: True}
    assert await live.metric("rollout_engine_up") == 1
    one.on(None, Act())
    await one.start()
    before = len(one.attempts)
    await until(lambda: _up(live, 2))
    await live.submit(*(prompt(f"B{number}") for number in range(8)))
    await live.collect(8)
    assert len(one.attempts) > before, "it is given work again"


async def test_waiting_for_an_engine_survives_a_second_engine_of_another_kind(
    engine: Engine, service: MakeService
) -> None:
    live = await service([engine.url, f"http://127.0.0.1:{free_port()}"])
    await live.submit(prompt("A"))
    await live.collect(1)
    assert await live.probe("/readyz") == 200


async def test_pause_stops_new_requests_and_retries_while_what_is_in_flight_goes_on(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:retry;", lambda a: Act(hold=a.nth < 4, status=503 if a.nth < 4 else 200))
    engine.on("p:A;", Act(hold=True))
    live = await service(dispatch={"max_attempts": 2})
    a, _ = await live.submit(prompt("A"), prompt("retry"))
    await engine.holding(8)
    assert (await live.http.post("/pause")).json()["paused"] is True
    (later,) = await live.submit(prompt("later"))
    engine.release()
    await live.wait_state(a, "ready")
    assert [group["group_id"] for group in (await live.pull(4, 0))["groups"]] == [a]
    await asyncio.sleep(0.4)  # the retries would have come after 0.1 s at most
    assert len(engine.find("p:retry;")) == 4
    assert await live.state(later) == "pending"
    assert await live.probe("/readyz") == 200
    assert await live.metric("rollout_paused") == 1
    await live.http.post("/resume")
    assert {group["prompt_id"] for group in await live.collect(2)} == {"retry", "later"}


async def test_nothing_is_generated_before_the_version_that_is_waited_for(engine: Engine, service: MakeService) -> None:
    live = await service(dispatch={"wait_for_version": 3})
    (group_id,) = await live.submit(prompt("A"))
    await live.bump(2)
    assert (await live.status())["blocked"] == "wait_for_version"
    assert await live.state(group_id) == "pending"
    assert engine.attempts == []
    await live.bump(3)
    assert (await live.collect(1))[0]["policy_version"] == 3


async def _is(value: Any, wanted: object) -> bool:
    return bool(await value == wanted)


async def _up(live: Any, count: int) -> bool:
    return bool(await live.metric("rollout_engine_up") == count)
