"""Leases under fault: two callers, lost answers, hang-ups, late acks, too much at once."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import LiveService, prompt, until


async def ready(live: LiveService, *keys: str) -> list[str]:
    """Submit prompts and wait until each is ready."""
    groups = await live.submit(*(prompt(key) for key in keys))
    for group_id in groups:
        await live.wait_state(group_id, "ready")
    return groups


async def test_the_oldest_version_comes_first_then_the_order_of_submission(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:late;", Act(hold=True))
    live = await service()
    (late,) = await live.submit(prompt("late"))
    await engine.holding(4)
    await live.bump(1)
    new = await ready(live, "b", "a", "c")
    engine.release()
    await live.wait_state(late, "ready")
    assert [group["group_id"] for group in (await live.pull())["groups"]] == [late, *new]


async def test_two_live_leases_never_hold_the_same_group_and_waiting_callers_are_served_in_turn(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    calls = []
    for number in range(6):
        calls.append(asyncio.create_task(live.pull(2, 30)))
        await until(lambda number=number: _waiting(live, number + 1))
    groups = await live.submit(*(prompt(f"A{number}") for number in range(12)))
    leases = await asyncio.gather(*calls)
    held = [group["group_id"] for lease in leases for group in lease["groups"]]
    assert len(held) == len(set(held))
    rest = await live.collect(12 - len(held)) if len(held) < 12 else []
    assert sorted(held + [group["group_id"] for group in rest]) == sorted(groups)
    again = await asyncio.gather(*(live.pull(2, 0) for _ in range(4)))
    assert [lease["status"] for lease in again] == ["empty"] * 4


async def test_nobody_overtakes_a_caller_that_waits_for_more(engine: Engine, service: MakeService) -> None:
    live = await service()
    first = asyncio.create_task(live.pull(4, 30, min_groups=3))
    await until(lambda: _waiting(live, 1))
    second = asyncio.create_task(live.pull(1, 30))
    await until(lambda: _waiting(live, 2))
    groups = await live.submit(prompt("A"), prompt("B"))
    for group_id in groups:
        await live.wait_state(group_id, "ready")
    assert not first.done()
    assert not second.done()
    await live.submit(prompt("C"))
    assert len((await first)["groups"]) >= 3
    await live.submit(prompt("D"))
    assert len((await second)["groups"]) == 1


async def test_a_lost_answer_is_fetched_again_by_its_request_id_with_the_same_content(
    engine: Engine, service: MakeService
) -> None:
    live = await service(groups={"max_staleness": 1})
    await ready(live, "A", "B")
    first = await live.pull(2, request_id="step-1")
    await live.bump(1)
    await live.bump(2)  # a bump changes nothing in a lease that lives
    again = await live.pull(2, request_id="step-1")
    volatile = ("outstanding", "expires_at")
    assert {k: v for k, v in again.items() if k not in volatile} == {
        k: v for k, v in first.items() if k not in volatile
    }
    assert (again["policy_version"], {group["staleness"] for group in again["groups"]}) == (0, {0})
    assert (await live.lease(3, request_id="step-1")).status_code == 409
    assert (await live.lease(2, request_id="step-1", lease_s=5)).status_code == 409
    assert (await live.ack(first["lease_id"], [first["groups"][0]["group_id"]])).status_code == 200
    after_part = await live.pull(2, request_id="step-1")
    assert after_part["groups"] == first["groups"], "an acked group is still of the lease"
    assert (await live.ack(first["lease_id"])).status_code == 200
    assert (await live.lease(2, request_id="step-1")).status_code == 409, "the lease is over"
    assert (await live.ack(first["lease_id"])).status_code == 200, "an ack can be repeated for ever"


async def test_ranks_with_one_request_id_share_one_wait_and_one_lease(engine: Engine, service: MakeService) -> None:
    live = await service()
    body = {"max_groups": 4, "min_groups": 4, "request_id": "step-7"}
    ranks = [asyncio.create_task(live.pull(wait_s=30, consumer=f"rank{rank}", **body)) for rank in range(4)]
    await until(lambda: _waiting(live, 1))
    assert (await live.lease(5, request_id="step-7")).status_code == 409
    await live.submit(*(prompt(f"A{number}") for number in range(4)))
    leases = await asyncio.gather(*ranks)
    assert len({lease["lease_id"] for lease in leases}) == 1
    assert len({json.dumps(lease["groups"]) for lease in leases}) == 1
    taken = [group["group_id"] for rank, lease in enumerate(leases) for group in lease["groups"][rank::4]]
    assert len(set(taken)) == 4


async def test_a_caller_that_hangs_up_while_it_waits_costs_no_group(engine: Engine, service: MakeService) -> None:
    """Public fault 23b."""
    live = await service()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.port}", timeout=60) as client:
        waiting = asyncio.create_task(client.post("/leases", json={"max_groups": 1, "wait_s": 60}))
        await until(lambda: _waiting(live, 1))
        waiting.cancel()
    await until(lambda: _waiting(live, 0), 2, "the handler ended")
    await ready(live, "A")
    assert len((await live.pull(1, 0))["groups"]) == 1


async def test_groups_of_a_caller_that_hung_up_are_ready_again_unless_a_request_id_can_fetch_them(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(text="r=1;" + "x" * 30_000))
    live = await service()
    await ready(live, *(f"A{number}" for number in range(8)))
    for request_id in (None, "step-1"):
        body = json.dumps({"max_groups": 8, "wait_s": 0, "request_id": request_id}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=1024)
        head = f"POST /leases HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert (await live.counts())["leased"] == 8
        writer.transport.abort()
        if request_id is None:
            await until(lambda: _in_state(live, "ready", 8), 5, "released at once")
    lease = await live.pull(8, 0, request_id="step-1")
    assert len(lease["groups"]) == 8
    assert (await live.counts())["leased"] == 8
    assert (await live.ack(lease["lease_id"])).status_code == 200


async def test_a_lease_that_expires_gives_its_groups_back_and_a_late_ack_is_taken_until_they_are_leased_again(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    a, b = await ready(live, "A", "B")
    first = await live.pull(2, lease_s=1)
    await live.wait_state(a, "ready")
    await live.wait_state(b, "ready")
    assert (await live.http.post(f"/leases/{first['lease_id']}/renew", json={})).status_code == 409
    assert (await live.ack(first["lease_id"], [a])).status_code == 200, "ready again in the same attempt"
    second = await live.pull(2)
    assert [group["group_id"] for group in second["groups"]] == [b]
    late = await live.ack(first["lease_id"])
    assert late.status_code == 409
    assert b in late.json()["detail"]
    assert "leased" in late.json()["detail"]
    assert (await live.ack(second["lease_id"])).status_code == 200


async def test_a_group_that_comes_back_too_old_goes_stale_and_a_leased_one_does_not(
    engine: Engine, service: MakeService
) -> None:
    live = await service(groups={"max_staleness": 0})
    a, b = await ready(live, "A", "B")
    lease = await live.pull(2)
    assert (await live.bump(1))["stale_groups"] == 0
    assert [await live.state(group_id) for group_id in (a, b)] == ["leased", "leased"]
    released = await live.http.post(f"/leases/{lease['lease_id']}/release", json={"group_ids": [a]})
    assert released.json()["released"] == [a]
    assert await live.state(a) == "stale"
    assert await live.metric("rollout_stale_groups_total") == 1
    assert (await live.ack(lease["lease_id"], [a])).status_code == 409
    assert (await live.ack(lease["lease_id"], [a, b])).status_code == 409, "all or nothing"
    assert await live.state(b) == "leased"
    assert (await live.ack(lease["lease_id"], [b])).status_code == 200


async def test_an_ack_of_what_was_generated_again_is_refused(engine: Engine, service: MakeService) -> None:
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue"})
    (a,) = await ready(live, "A")
    lease = await live.pull(1)
    await live.bump(1)
    await live.http.post(f"/leases/{lease['lease_id']}/release", json={})
    group = await live.wait_state(a, "ready")
    assert (group["attempt"], group["policy_version"]) == (2, 1)
    assert (await live.ack(lease["lease_id"])).status_code == 409
    assert (await live.collect(1))[0]["attempt"] == 2


async def test_acks_of_unknown_leases_and_groups_are_404_and_do_nothing(engine: Engine, service: MakeService) -> None:
    live = await service()
    (a,) = await ready(live, "A")
    (b,) = await ready(live, "B")
    lease = await live.pull(1)
    assert [group["group_id"] for group in lease["groups"]] == [a]
    assert (await live.ack("nonsense")).status_code == 404
    assert (await live.ack(lease["lease_id"], ["g-999"])).status_code == 404
    assert (await live.ack(lease["lease_id"], ["nonsense"])).status_code == 404
    assert (await live.ack(lease["lease_id"], [a, "g-999"])).status_code == 404
    assert await live.state(a) == "leased"
    assert (await live.ack(lease["lease_id"], [a, b])).status_code == 409, "B was never of this lease"
    assert await live.state(a) == "leased"
    assert await live.state(b) == "ready"


async def test_many_acks_at_once_count_once(engine: Engine, service: MakeService) -> None:
    live = await service()
    await ready(live, "A", "B")
    lease = await live.pull(2)
    answers = await asyncio.gather(*(live.ack(lease["lease_id"]) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert (await live.counts())["acked"] == 2
    assert await live.metric("rollout_acked_groups_total") == 2


async def test_ack_release_and_renew_at_once_leave_each_group_with_one_fate(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    for number in range(10):
        (group_id,) = await ready(live, f"A{number}")
        path = f"/leases/{(await live.pull(1))['lease_id']}"
        ack, release, renew = await asyncio.gather(
            *(live.http.post(f"{path}/{call}", json={}) for call in ("ack", "release", "renew"))
        )
        assert ack.status_code == 200, "leased by it, or ready again in the same attempt"
        assert release.status_code == 200
        assert renew.status_code in (200, 409)
        assert await live.state(group_id) == "acked"


async def test_exhausted_means_final_and_nothing_outstanding_and_empty_everything_else(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 4: ten prompts, batches of four."""
    live = await service()
    assert (await live.pull(wait_s=0))["status"] == "empty"
    await live.submit(*(prompt(f"A{number}") for number in range(10)), final=True)
    for size in (4, 4, 2):
        lease = await live.pull(4, 30, min_groups=4)
        assert len(lease["groups"]) == size
        if size == 2:
            assert (await live.pull(wait_s=0))["status"] == "empty", "two are leased and may come back"
            waiting = asyncio.create_task(live.pull(4, 30, min_groups=4))
            await until(lambda: _waiting(live, 1))
        await live.ack(lease["lease_id"])
    assert (await waiting)["status"] == "exhausted", "those who wait hear it at once"
    last = await live.pull(wait_s=30)
    assert (last["status"], last["outstanding"], last["lease_id"]) == ("exhausted", 0, None)
    assert (await live.post_prompts(prompt("B"))).status_code == 409
    assert (await live.post_prompts(prompt("A0"))).status_code == 202, "a known one is no new one"
    assert (await live.pull(wait_s=0))["status"] == "exhausted"


async def test_nothing_yet_is_told_apart_from_nothing_ever(engine: Engine, service: MakeService) -> None:
    """Public fault 3."""
    engine.on(None, Act(hold=True))
    live = await service()
    await live.submit(prompt("A"), final=True)
    lease = await live.pull(wait_s=1)
    assert (lease["status"], lease["outstanding"], lease["groups"]) == ("empty", 1, [])


async def test_a_filtered_group_does_not_keep_a_batch_waiting(engine: Engine, service: MakeService) -> None:
    """Public fault 7: three of four, for no more can come."""
    engine.on("p:same;", Act(text="r=1;"))
    live = await service(groups={"zero_variance": "drop"})
    groups = await live.submit(prompt("A"), prompt("B"), prompt("same"), prompt("C"), final=True)
    lease = await live.pull(4, 30, min_groups=4)
    assert len(lease["groups"]) == 3
    assert (await live.group(groups[2]))["reason"] == "zero_variance"


@pytest.mark.parametrize("min_groups", [5, 9])
async def test_min_groups_that_can_never_be_met_are_refused(
    engine: Engine, service: MakeService, min_groups: int
) -> None:
    live = await service(groups={"max_ready_groups": 8})
    answer = await live.lease(4 if min_groups == 5 else 64, min_groups=min_groups)
    assert answer.status_code == 422
    assert "min_groups" in answer.json()["detail"]


async def test_min_groups_not_met_at_the_deadline_is_empty_and_takes_nothing(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    await ready(live, "A")
    lease = await live.pull(4, 1, min_groups=2)
    assert (lease["status"], lease["groups"]) == ("empty", [])
    assert (await live.counts())["ready"] == 1


async def test_max_lease_bytes_shortens_a_lease_but_never_below_one_group(engine: Engine, service: MakeService) -> None:
    live = await service(store={"max_lease_bytes": 3000})
    await ready(live, *"ABCD")
    sizes = [len((await live.pull(4, 0))["groups"]) for _ in range(4)]
    assert sum(sizes) == 4
    assert max(sizes) < 4
    tiny = await service(store={"max_lease_bytes": 1})
    await ready(tiny, "A", "B")
    assert [len((await tiny.pull(2, 0))["groups"]) for _ in range(3)] == [1, 1, 0]


async def test_a_deleted_group_leaves_every_state_once_and_cannot_be_deleted_twice(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:held;", Act(hold=True))
    live = await service()
    (is_ready, leased) = await ready(live, "leased", "ready")
    lease = await live.pull(1)
    (held,) = await live.submit(prompt("held"))
    await engine.holding(4)
    for group_id in (held, is_ready, leased):
        assert (await live.http.delete(f"/groups/{group_id}")).status_code == 200
        assert (await live.http.delete(f"/groups/{group_id}")).status_code == 409
    await engine.holding(0)
    assert (await live.http.delete("/groups/g-99")).status_code == 404
    assert (await live.ack(lease["lease_id"])).status_code == 409
    assert (await live.counts())["dropped"] == 3
    assert await live.metric("rollout_dropped_groups_total", 'reason="cancelled"') == 3
    assert await live.slots_used() == 0


async def test_a_known_identity_is_not_submitted_twice_and_other_content_is_refused_whole(
    engine: Engine, service: MakeService
) -> None:
    live = await service()
    same = await asyncio.gather(*(live.submit(prompt("A", tag=1)) for _ in range(5)))
    assert len({tuple(groups) for groups in same}) == 1
    assert await live.submit(prompt("A", tag=1), prompt("A", tag=1)) == same[0] * 2
    answer = await live.post_prompts(prompt("new"), prompt("A", tag=2))
    assert answer.status_code == 409
    assert (await live.counts())["submitted"] == 1, "all or nothing"
    (next_epoch,) = await live.submit(prompt("A", tag=2) | {"epoch": 1})
    assert next_epoch != same[0][0]
    assert len(await live.collect(2)) == 2
    assert await live.submit(prompt("A", tag=1)) == same[0], "an acked one is known too"
    assert (await live.counts())["submitted"] == 2


async def _waiting(live: LiveService, count: int) -> bool:
    return bool((await live.status())["leases"]["waiting_calls"] == count)


async def _in_state(live: LiveService, state: str, count: int) -> bool:
    return (await live.counts())[state] == count
