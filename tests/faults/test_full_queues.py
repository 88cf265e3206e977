"""Every queue is bounded: the full one says so, dispatch pauses, and everything moves again at once."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import LiveService, prompt, until


async def ready_count(live: LiveService) -> int:
    return (await live.counts())["ready"]


async def test_a_full_queue_of_prompts_answers_429_with_retry_after_and_takes_nothing(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_pending_groups": 4}, dispatch={"max_inflight_rollouts": 4})
    await live.submit(prompt("first"))
    await engine.holding(4)
    await live.submit(*(prompt(f"A{number}") for number in range(3)))
    full = await live.post_prompts(prompt("B"), prompt("C"))
    assert full.status_code == 429
    assert int(full.headers["retry-after"]) >= 1
    assert full.headers["content-type"] == "application/problem+json"
    assert (await live.counts())["submitted"] == 4, "all or nothing"
    await live.submit(prompt("B"))
    assert (await live.post_prompts(prompt("A0"))).status_code == 202, "a known one takes no room"
    assert (await live.post_prompts(*(prompt(f"D{number}") for number in range(5)))).status_code == 422
    engine.on(None, Act())
    engine.release()
    assert len(await live.collect(5)) == 5
    await live.submit(prompt("C"))


async def test_dispatch_pauses_at_max_ready_groups_and_fills_all_slots_at_once_when_groups_are_pulled(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 10: not one by one."""
    live = await service(groups={"max_ready_groups": 4}, dispatch={"max_inflight_rollouts": 16})
    await live.submit(*(prompt(f"A{number}") for number in range(40)))
    await until(lambda: _settled(live))
    counts = await live.counts()
    assert 4 <= counts["ready"] <= 4 + 4, "groups that were open when it filled up still finish"
    assert counts["generating"] == counts["scoring"] == 0
    assert (await live.status())["blocked"] == "max_ready_groups"
    asked = len(engine.attempts)
    engine.on(None, Act(hold=True))
    lease = await live.pull(64, 0)
    await engine.holding(16)
    assert len(engine.attempts) == asked + 16
    await live.ack(lease["lease_id"])


async def test_dispatch_pauses_at_max_ready_bytes(engine: Engine, service: MakeService) -> None:
    """Public fault 55: a trainer that pulls nothing."""
    engine.on(None, Act(text="r=1;" + "x" * 5000))
    live = await service(groups={"max_ready_bytes": 300_000}, dispatch={"max_inflight_rollouts": 4})
    await live.submit(*(prompt(f"A{number}") for number in range(30)))
    await until(lambda: _settled(live))
    assert (await live.status())["blocked"] == "max_ready_bytes"
    ready = await ready_count(live)
    assert ready in (2, 3), "of about 200 kB each; one that was open when the bound was reached still finishes"
    assert len(engine.attempts) == 4 * ready
    assert len(await live.collect(30)) == 30


async def test_pace_counts_a_leased_group_until_the_next_version_even_when_it_is_acked(
    engine: Engine, service: MakeService
) -> None:
    live = await service(
        groups={"max_staleness": 1}, dispatch={"admission": "pace", "groups_per_step": 2, "max_inflight_rollouts": 64}
    )
    await live.submit(*(prompt(f"A{number}") for number in range(20)))
    await until(lambda: _in_state(live, "ready", 4))
    assert (await live.status())["blocked"] == "pace"
    lease = await live.pull(2)
    await live.ack(lease["lease_id"])
    assert len(engine.attempts) == 16
    assert (await live.status())["blocked"] == "pace"
    await live.bump(1)
    await until(lambda: len(engine.attempts) == 24)
    assert (await live.lease(64, min_groups=5)).status_code == 422


async def test_a_trainer_that_acks_late_does_not_stop_dispatch(engine: Engine, service: MakeService) -> None:
    live = await service(
        groups={"max_staleness": 1}, dispatch={"admission": "pace", "groups_per_step": 2, "max_inflight_rollouts": 64}
    )
    await live.submit(*(prompt(f"A{number}") for number in range(20)))
    leases = []
    for version in range(1, 6):
        leases.append(await live.pull(2, 30, min_groups=2))
        await live.bump(version)
    assert (await live.counts())["leased"] == 10
    for lease in leases:
        assert (await live.ack(lease["lease_id"])).status_code == 200
        assert {group["staleness"] for group in lease["groups"]} <= {0, 1}
    assert await live.metric("rollout_stale_groups_total") == 0, "what the pace is for"


async def test_hundreds_of_dispatches_and_aborts_leak_neither_slots_nor_connections(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 57."""
    engine.on("p:A", Act(hold=True))
    live = await service(
        groups={"max_staleness": 0, "on_stale": "requeue", "max_group_attempts": 1000},
        dispatch={"max_inflight_rollouts": 32},
    )
    await live.submit(*(prompt(f"A{number}", 8) for number in range(4)))
    for version in range(1, 16):
        await until(lambda version=version: len(engine.attempts) == 32 * version)
        await live.bump(version)
    await engine.holding(32)
    assert engine.connections <= 32 + 8, "aborted requests closed theirs"
    engine.on("p:A", Act())
    await live.bump(16)
    assert len(await live.collect(4)) == 4
    await engine.holding(0)
    assert await live.slots_used() == 0


async def test_a_prompt_wider_than_all_slots_is_made_a_few_rows_at_a_time(engine: Engine, service: MakeService) -> None:
    live = await service(dispatch={"max_inflight_rollouts": 3})
    await live.submit(prompt("wide", 50))
    (group,) = await live.collect(1)
    assert len(group["samples"]) == 50
    assert [sample["index"] for sample in group["samples"]] == list(range(50))


async def test_engines_take_no_more_than_their_own_limit_and_all_of_it(service: MakeService, make_engine: Any) -> None:
    small, large = await make_engine(), await make_engine()
    for engine in (small, large):
        engine.on(None, Act(hold=True))
    engines = [{"url": small.url, "max_inflight": 5}, {"url": large.url, "max_inflight": 20}]
    live = await service([], engines=engines)
    await live.submit(*(prompt(f"A{number}") for number in range(10)))
    await small.holding(5)
    await large.holding(20)
    assert await live.slots_used() == 25
    for engine in (small, large):
        engine.on(None, Act())
        engine.release()
    assert len(await live.collect(10)) == 10
    assert len(small.attempts) + len(large.attempts) == 40


async def test_400_rollouts_in_flight_at_once_all_finish_and_none_fails(engine: Engine, service: MakeService) -> None:
    """Public fault 58, as large as a shared machine likes it."""
    engine.on(None, Act(hold=True))
    live = await service(dispatch={"max_inflight_rollouts": 400}, groups={"max_ready_groups": 256})
    live_bump = asyncio.create_task(live.bump(1))
    await live.submit(*(prompt(f"A{number}", 8) for number in range(50)))
    await live_bump
    await until(lambda: len(engine.in_flight()) >= 256, what="the engine's own limit is 256")
    engine.on(None, Act())
    engine.release()
    assert len(await live.collect(50)) == 50
    assert await live.metric("rollout_failed_total") == 0


async def _settled(live: LiveService) -> bool:
    counts = await live.counts()
    blocked = (await live.status())["blocked"]
    return blocked is not None and not counts["generating"] and not counts["scoring"]


async def _in_state(live: LiveService, state: str, count: int) -> bool:
    return (await live.counts())[state] == count
