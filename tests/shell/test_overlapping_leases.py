"""Leases that had the same group, one after the other."""

from __future__ import annotations

from rollout_service.orchestrator import LeaseRequest
from rollout_service.store import MemoryStore
from tests.fakes import Harness, Runner, finished, submission, until


async def test_a_lease_is_answered_again_with_what_was_acked_under_it_when_an_earlier_one_of_the_group_ends():
    store = MemoryStore(4)
    harness = Harness(store, runner=Runner(answer=lambda job: finished(job.index)))
    async with harness as door:
        await door.submit([submission(name) for name in "abc"])
        await until(lambda: door.status().counts.groups["ready"] == 3, "ready")
        first = await door.lease(LeaseRequest(max_groups=2, wait_s=5))
        assert first.lease is not None
        await door.release(first.lease.lease_id, ["g-1"])
        ask = LeaseRequest(max_groups=2, wait_s=5, request_id="step-1")
        second = await door.lease(ask)
        assert second.lease is not None
        assert [payload.group.group_id for payload in second.payloads] == ["g-1", "g-3"]
        await door.ack(second.lease.lease_id, ["g-1"])
        await door.ack(first.lease.lease_id, ["g-2"])  # the first lease is over, the second lives
        again = await door.lease(ask)
        assert [payload.group.group_id for payload in again.payloads] == ["g-1", "g-3"]
        await door.ack(second.lease.lease_id, None)
        payloads = await store.payloads([1, 2, 3])
        assert [payload.rollouts for payload in payloads] == [{}, {}, {}], "nothing is kept for ever"
