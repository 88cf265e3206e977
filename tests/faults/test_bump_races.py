"""A bump in the same instant as a completion: whichever wins, the group ends once and nothing stale is delivered."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import LiveService, prompt

ROUNDS = 200
OFFSET_S = 0.005
STEP_S = 0.001


class Race:
    """A lease call waits; each round releases a held group and bumps the version about when it becomes ready.

    What "about" means is learnt: the centre moves towards the other outcome after every round, so that both are met
    however fast the machine is. Around it offsets are drawn from -5 to +5 ms.
    """

    def __init__(self, live: LiveService, engine: Engine) -> None:
        self.live, self.engine = live, engine
        self.centre_s = 0.02
        self.version = 0
        self.delivered: list[float] = []
        self.cancelled: list[float] = []
        self._lease = asyncio.create_task(live.lease(wait_s=60))
        self._offsets = random.Random(1)

    async def round(self, number: int) -> None:
        offset = self._offsets.uniform(-OFFSET_S, OFFSET_S)
        (group_id,) = await self.live.submit(prompt(f"{number}", 2))
        await self.engine.holding(2, f"p:{number};")
        self.version += 1
        bump = asyncio.create_task(self._bump_after(self.centre_s + offset))
        self.engine.release()
        answer = await bump
        assert answer.status_code == 200
        assert answer.json()["stale_groups"] in (0, 1)
        state = await self.live.state(group_id)
        if state == "stale":
            self.cancelled.append(offset)
            self.centre_s += STEP_S
            assert answer.json()["stale_groups"] == 1
            assert not self._lease.done(), "a lease was made of a group that is stale"
        else:
            self.delivered.append(offset)
            self.centre_s = max(OFFSET_S, self.centre_s - STEP_S)
            assert state == "leased"
            assert answer.json()["stale_groups"] == 0
            await self._take(group_id)
        assert await self.live.slots_used() == 0
        await self.live.counts()

    async def _bump_after(self, seconds: float) -> httpx.Response:
        await asyncio.sleep(seconds)
        return await self.live.post_version(self.version)

    async def _take(self, group_id: str) -> None:
        lease = (await self._lease).json()
        (group,) = lease["groups"]
        assert group["group_id"] == group_id
        assert len(group["samples"]) == 2
        assert lease["policy_version"] == group["policy_version"] == self.version - 1, "never stale at its lease"
        assert (await self.live.ack(lease["lease_id"])).status_code == 200, "a leased group is the trainer's"
        assert (await self.live.ack(lease["lease_id"])).status_code == 200
        self._lease = asyncio.create_task(self.live.lease(wait_s=60))

    def end(self) -> None:
        self._lease.cancel()


@pytest.mark.timeout(240)
async def test_a_bump_in_the_instant_of_completion_ends_the_group_exactly_once_200_times(
    engine: Engine, service: MakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    race = Race(live, engine)
    for number in range(ROUNDS):
        await race.round(number)
    race.end()
    delivered, cancelled = len(race.delivered), len(race.cancelled)
    with capsys.disabled():
        print(f"\n{ROUNDS} rounds: {delivered} delivered, {cancelled} cancelled; bump at {race.centre_s * 1e3:.0f} ms")
    assert min(delivered, cancelled) >= 20
    counts = await live.counts()
    assert (counts["acked"], counts["stale"]) == (delivered, cancelled)
    assert await live.metric("rollout_stale_groups_total") == cancelled
    assert await live.metric("rollout_acked_groups_total") == delivered
    assert await live.metric("rollout_delivered_groups_total") == delivered
    assert await live.metric("rollout_failed_total") == 0


async def test_with_requeue_every_group_of_such_a_race_is_delivered_once_and_fresh(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(delay=0.01))
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue", "max_group_attempts": 1000})
    groups = await live.submit(*(prompt(f"{number}", 2) for number in range(30)))
    collecting = asyncio.create_task(live.collect(30, within_s=60))
    pauses = random.Random(2)
    for version in range(1, 41):
        await live.bump(version)
        await asyncio.sleep(pauses.uniform(0, 0.06))
    await collecting
    delivered = [group["group_id"] for group in collecting.result()]
    assert sorted(delivered) == sorted(groups)
    counts = await live.counts()
    assert (counts["acked"], counts["submitted"]) == (30, 30)
    assert await live.slots_used() == 0
