"""The page for Prometheus under fault: at 0 from the start, back to rest after a cancel, bounded for ever."""

from __future__ import annotations

import asyncio

from rollout_service.core.model import DropReason
from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import LiveService, prompt

NAMED = ("rollout_failed_total", "rollout_dropped_groups_total", "rollout_stale_groups_total")


async def test_every_counter_is_there_at_zero_with_every_reason_on_the_first_scrape(service: MakeService) -> None:
    live = await service()
    page = await live.metrics()
    for name in NAMED:
        assert {value for (found, _), value in page.items() if found == name} == {0.0}
    for reason in DropReason:
        assert page["rollout_dropped_groups_total", f'{{reason="{reason}"}}'] == 0
    for name in ("failed_groups", "halts", "aborts", "acked_groups"):
        assert page[f"rollout_{name}_total", ""] == 0
    assert page["rollout_reward_errors_total", '{reward="accuracy"}'] == 0
    assert page["rollout_slots", '{state="free"}'] == 64
    types = (await live.http.get("/metrics")).text
    for line in types.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name.endswith("_total") is (kind == "counter"), line


async def test_gauges_read_rest_on_the_next_scrape_after_a_mass_cancel(engine: Engine, service: MakeService) -> None:
    """Public fault 64."""
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    await live.submit(*(prompt(f"A{number}") for number in range(16)))
    await engine.holding(64)
    assert await live.metric("rollout_inflight_rollouts") == 64
    assert await live.metric("rollout_slots", "free") == 0
    await live.bump(1)
    page = await live.metrics()
    assert page["rollout_inflight_rollouts", ""] == 0
    assert (page["rollout_slots", '{state="free"}'], page["rollout_slots", '{state="used"}']) == (64, 0)
    assert page["rollout_groups", '{state="stale"}'] == 16
    assert page["rollout_groups", '{state="generating"}'] == 0
    assert page["rollout_stale_groups_total", ""] == 16
    assert page["rollout_aborts_total", ""] == 64
    await engine.holding(0)
    assert await live.metric("rollout_engine_load") == 0


async def test_the_number_of_series_is_constant_under_many_ids_and_random_paths(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 63."""
    live = await service()

    async def exercise(tag: str) -> set[tuple[str, str]]:
        await live.submit(*(prompt(f"{tag}.{number}", tag=tag) for number in range(10)))
        await live.collect(10)
        for number in range(10):
            await live.http.get(f"/{tag}/{number}")
            await live.http.get(f"/groups/g-9{number}99999{ord(tag)}")
            await live.http.post(f"/leases/{tag}{number}/ack", json={})
            await live.http.request("PATCH" if number else "OPTIONS", f"/{tag}")
            await live.lease(1, wait_s=0, request_id=f"{tag}{number}", consumer=f"{tag}{number}")
        return set(await live.metrics())

    await live.metrics()
    first = await exercise("a")
    for tag in ("b", "c"):
        assert await exercise(tag) == first


async def test_counters_never_fall_while_the_run_goes_on(engine: Engine, service: MakeService) -> None:
    """Public fault 62."""
    engine.on("p:bad", Act(status=400))
    live = await service(groups={"halt_after_failed_groups": 0})
    working = asyncio.create_task(_work(live))
    last: dict[tuple[str, str], float] = {}
    scrapes = 0
    while not working.done() or scrapes < 50:
        page = await live.metrics()
        for key, value in page.items():
            if key[0].endswith(("_total", "_bucket", "_count")):
                assert value >= last.get(key, 0), key
        last = page
        scrapes += 1
    await working
    assert last["rollout_failed_groups_total", ""] == 5


async def test_generated_tokens_are_those_delivered_and_those_wasted(engine: Engine, service: MakeService) -> None:
    engine.on("p:lone;", lambda a: Act(status=400) if a.nth else Act(text="r=1;"))
    engine.on("p:cut;", Act(text="r=1;"))
    live = await service(groups={"max_staleness": 0})
    (lone,) = await live.submit(prompt("lone"))
    await live.wait_state(lone, "dropped")
    (cut,) = await live.submit(prompt("cut"))
    await live.wait_state(cut, "ready")
    await live.bump(1)
    engine.on("p:A;", Act(text="r=1;"))
    await live.submit(prompt("A"))
    await live.collect(1)
    generated = await live.metric("rollout_generated_tokens_total")
    delivered = await live.metric("rollout_delivered_tokens_total")
    assert (generated, delivered) == (4 + 16 + 16, 16)
    assert await live.metric("rollout_wasted_tokens_total", "stale") == 16
    assert await live.metric("rollout_wasted_tokens_total", "too_few_survivors") == 4


async def _work(live: LiveService) -> None:
    for number in range(5):
        await live.submit(prompt(f"good{number}"), prompt(f"bad{number}"))
        await live.collect(1)
        await live.bump(number + 1)
    await asyncio.sleep(0)
    while (await live.counts())["failed"] < 5:
        await asyncio.sleep(0.01)
