"""What a new policy version cancels, what it leaves alone, and what becomes of the rest."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine, says
from tests.service import prompt, trained_text, until

STALE = "rollout_stale_groups_total"


async def test_a_bump_aborts_the_stale_group_at_the_engine_and_leaves_the_fresh_one_beside_it_alone(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 1})
    (old,) = await live.submit(prompt("old"))
    await engine.holding(4, "p:old;")
    await live.bump(1)
    (fresh,) = await live.submit(prompt("fresh"))
    await engine.holding(4, "p:fresh;")
    assert await live.bump(2) == {"version": 2, "previous": 1, "stale_groups": 1, "aborted_rollouts": 4}
    assert await live.state(old) == "stale"
    await engine.holding(0, "p:old;")
    assert {attempt.left for attempt in engine.find("p:old;")} <= {"aborted", "disconnected"}
    assert len(engine.in_flight("p:fresh;")) == 4
    assert not any(attempt.left for attempt in engine.find("p:fresh;"))
    engine.release("p:fresh;")
    (group,) = await live.collect(1)
    assert (group["group_id"], group["policy_version"], group["staleness"]) == (fresh, 1, 1)
    assert len(group["samples"]) == 4
    assert await live.metric(STALE) == 1
    assert await live.metric("rollout_failed_total") == await live.metric("rollout_dropped_groups_total") == 0
    assert await live.metric("rollout_aborts_total") == 4
    assert len(engine.attempts) == 8


async def test_staleness_s_is_good_and_s_plus_one_is_not_wherever_the_group_waits(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:generating;", Act(hold=True))
    live = await service(groups={"max_staleness": 2}, reward_workers={"processes": 2})
    rows = [prompt("generating"), prompt("scoring", mode="sleep"), prompt("ready")]
    groups = await live.submit(*rows)
    for group_id, state in zip(groups, ("generating", "scoring", "ready"), strict=True):
        await live.wait_state(group_id, state)
    for version in (1, 2):
        assert (await live.bump(version))["stale_groups"] == 0
    assert [await live.state(group_id) for group_id in groups] == ["generating", "scoring", "ready"]
    assert (await live.bump(3))["stale_groups"] == 3
    assert [await live.state(group_id) for group_id in groups] == ["stale"] * 3
    assert (await live.pull(wait_s=0))["groups"] == []
    assert await live.metric(STALE) == 3
    assert await live.slots_used() == 0


async def test_the_version_of_a_group_is_the_one_at_its_first_dispatch(engine: Engine, service: MakeService) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(dispatch={"max_inflight_rollouts": 4})
    a, b = await live.submit(prompt("A"), prompt("B"))
    await engine.holding(4)
    await live.bump(1)  # A was dispatched before it, B was submitted before it and is dispatched after it
    assert (await live.group(b))["policy_version"] is None
    engine.release()
    groups = {group["group_id"]: group for group in await live.collect(2)}
    assert (groups[a]["policy_version"], groups[a]["staleness"]) == (0, 1)
    assert (groups[b]["policy_version"], groups[b]["staleness"]) == (1, 0)


async def test_a_pending_group_is_never_stale(engine: Engine, service: MakeService) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 4})
    a, b = await live.submit(prompt("A"), prompt("B"))
    await engine.holding(4, "p:A;")
    assert (await live.bump(9))["stale_groups"] == 1
    assert await live.state(a) == "stale"
    (group,) = await live.collect(1)
    assert (group["group_id"], group["policy_version"]) == (b, 9)


async def test_a_partly_dispatched_group_goes_on_with_the_rows_that_were_never_sent(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", lambda a: says(0.5, "old", hold=a.nth > 0))
    engine.on("p:first;", Act(hold=True))
    live = await service(groups={"max_staleness": 1}, dispatch={"max_inflight_rollouts": 5})
    first, a = await live.submit(prompt("first", 3), prompt("A", 6))
    # Two rows go out, one of them finishes, and its slot goes to a third.
    await until(lambda: len(engine.find("p:A;")) == 3 and len(engine.in_flight("p:A;")) == 2)
    rows = (await live.group(a))["rows"]
    assert len(rows["finished"]) == 1
    assert sorted(rows["running"] + rows["finished"]) == [0, 1, 2]
    engine.on("p:A;", lambda x: says(x.nth / 8, "new"))
    bumped = await live.bump(2)
    assert bumped["stale_groups"] == 2
    assert (await live.wait_state(first, "stale"))["reason"] is None
    (group,) = await live.collect(1)
    assert (group["group_id"], group["policy_version"], group["staleness"], group["attempt"]) == (a, 2, 0, 2)
    assert [sample["index"] for sample in group["samples"]] == [3, 4, 5], "rows keep their numbers"
    assert {trained_text(sample)[-3:] for sample in group["samples"]} == {"new"}, "attempts never mix"
    assert len(engine.find("p:A;")) == 6
    assert await live.metric(STALE) == 2
    assert await live.slots_used() == 0


async def test_the_rest_of_a_partly_dispatched_group_can_be_cut_again_and_waits_at_the_front(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 3})
    a, _ = await live.submit(prompt("A", 8), prompt("B", 4))
    await engine.holding(3, "p:A;")
    await live.bump(1)
    await until(lambda: len(engine.find("p:A;")) == 6, what="rows 3 to 5 go before B")
    await engine.holding(3, "p:A;")
    assert engine.find("p:B;") == []
    assert (await live.group(a))["rows"] == {"waiting": [6, 7], "running": [3, 4, 5], "finished": [], "failed": []}
    engine.on("p:A;", Act())
    await live.bump(2)
    groups = {group["group_id"]: group for group in await live.collect(2)}
    assert [sample["index"] for sample in groups[a]["samples"]] == [6, 7]
    assert (groups[a]["policy_version"], groups[a]["attempt"]) == (2, 3)
    assert await live.metric(STALE) == 2
    assert (await live.counts())["acked"] == 2


async def test_a_rest_too_small_for_a_group_is_never_sent_and_the_group_ends_stale(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0, "min_group_size": 3}, dispatch={"max_inflight_rollouts": 6})
    (a,) = await live.submit(prompt("A", 8))
    await engine.holding(6)
    assert await live.bump(1) == {"version": 1, "previous": 0, "stale_groups": 1, "aborted_rollouts": 6}
    assert await live.state(a) == "stale"
    await live.submit(prompt("B"))
    assert (await live.collect(1))[0]["prompt_id"] == "B", "its slots are free"
    assert len(engine.find("p:A;")) == 6


async def test_stale_with_nothing_in_flight_the_rest_of_the_rows_goes_at_the_new_version_only(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 13: a sweep must not look at what is in flight alone."""
    engine.on("p:A;", says(0.25, "old", hold=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 2})
    (a,) = await live.submit(prompt("A", 8))
    await engine.holding(2)
    await live.http.post("/pause")
    engine.release()
    await until(lambda: _finished(live, a, 2))
    engine.on("p:A;", lambda x: says(x.nth / 8, "new"))
    assert await live.bump(1) == {"version": 1, "previous": 0, "stale_groups": 1, "aborted_rollouts": 0}
    assert len(engine.find("p:A;")) == 2
    await live.http.post("/resume")
    (group,) = await live.collect(1)
    assert [sample["index"] for sample in group["samples"]] == [2, 3, 4, 5, 6, 7]
    assert group["policy_version"] == 1
    assert {trained_text(sample)[-3:] for sample in group["samples"]} == {"new"}


async def test_requeue_generates_the_whole_prompt_again_under_new_ids_and_mixes_nothing(
    engine: Engine, service: MakeService
) -> None:
    """Public faults 15 and 34."""
    engine.on("p:A;", lambda a: says(0.5, "old", hold=a.nth > 1))
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue"}, dispatch={"max_inflight_rollouts": 4})
    a, _ = await live.submit(prompt("A"), prompt("B"))
    await engine.holding(2, "p:A;")
    await until(lambda: _finished(live, a, 2))
    engine.on("p:A;", lambda x: says(x.nth / 8, "new"))
    bumped = await live.bump(1)
    assert bumped["stale_groups"] >= 1
    groups = {group["group_id"]: group for group in await live.collect(2)}
    group = groups[a]
    assert [sample["index"] for sample in group["samples"]] == [0, 1, 2, 3]
    assert (group["attempt"], group["policy_version"]) == (2, 1)
    assert {trained_text(sample)[-3:] for sample in group["samples"]} == {"new"}
    assert len({attempt.asked.request_id for attempt in engine.attempts}) == len(engine.attempts)
    assert len({tuple(attempt.body["prompt"]) for attempt in engine.find("p:A;")}) == 1


async def test_requeue_ends_stale_after_max_group_attempts_and_counts_each(
    engine: Engine, service: MakeService
) -> None:
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue", "max_group_attempts": 3})
    (a,) = await live.submit(prompt("A"))
    for version in (1, 2, 3):
        await until(lambda: len(engine.find()) == 4 * version and len(engine.in_flight()) == 4)  # noqa: B023 - awaited in this very turn
        await live.bump(version)
    assert await live.state(a) == "stale"
    assert await live.metric(STALE) == 3
    assert (await live.counts())["stale"] == 1
    assert len(engine.attempts) == 12


async def test_ready_groups_are_requeued_and_generated_again(engine: Engine, service: MakeService) -> None:
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue"})
    (a,) = await live.submit(prompt("A"))
    await live.wait_state(a, "ready")
    await live.bump(1)
    (group,) = await live.collect(1)
    assert (group["group_id"], group["policy_version"], group["attempt"]) == (a, 1, 2)


async def test_scoring_is_abandoned_by_a_bump_while_the_judge_sleeps_and_other_groups_are_scored(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 22."""
    rewards = [{"name": "accuracy", "function": "fault_rewards:accuracy", "timeout_s": 600.0}]
    live = await service(groups={"max_staleness": 0}, rewards=rewards)
    (slow,) = await live.submit(prompt("slow", mode="sleep"))
    await live.wait_state(slow, "scoring")
    await until(live.reward_calls)
    assert (await live.bump(1))["stale_groups"] == 1
    await live.submit(*(prompt(f"next{number}") for number in range(3)))
    assert len(await live.collect(3)) == 3, "the only worker is free again"
    assert await live.metric("rollout_reward_errors_total") == 0


async def test_an_engine_that_ignores_aborts_and_answers_late_settles_nothing(
    engine: Engine, service: MakeService
) -> None:
    """Public faults 16, 19 and 23a."""
    engine.on("p:A;", says(1.0, "late", hold=True, ignore_abort=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 4})
    (a,) = await live.submit(prompt("A"))
    await engine.holding(4)
    await live.bump(1)
    assert await live.slots_used() == 0
    engine.release()
    await live.submit(prompt("B"))
    (group,) = await live.collect(1)
    assert group["prompt_id"] == "B"
    assert await live.state(a) == "stale"
    assert [call["ids"][0][:2] for call in live.reward_calls()] == [list(b"r=")], "A was never scored"
    assert await live.metric("rollout_finished_total") == 4


async def test_without_abort_routes_closing_the_connection_frees_the_engine_and_that_is_said_once(
    service: MakeService, make_engine: object
) -> None:
    plain = await make_engine(dev_mode=False)  # type: ignore[operator]  # typed as object
    plain.on(None, Act(hold=True))
    live = await service([plain.url], groups={"max_staleness": 0})
    for version in (1, 2):
        await live.submit(prompt(f"A{version}"))
        await plain.holding(4)
        await live.bump(version)
        await plain.holding(0)
    assert {attempt.left for attempt in plain.attempts} == {"disconnected"}
    assert len(live.logged("engine_has_no_abort_route")) == 1


async def test_an_abort_that_overtakes_its_request_still_ends_it(engine: Engine, service: MakeService) -> None:
    """Public fault 19: a bump in the instant of dispatch, whatever has reached the engine by then."""
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    for version in range(1, 21):
        await asyncio.gather(live.submit(prompt(f"A{version}")), live.bump(version))
    (last,) = await live.submit(prompt("last"))
    await live.wait_state(last, "generating")
    await engine.holding(4, "p:last;")
    await live.bump(21)
    await until(lambda: not [a for a in engine.in_flight() if "p:A" in a.prompt], 2, "stale requests ended")
    await engine.holding(0)
    counts = await live.counts()
    assert counts["stale"] == 21
    assert await live.slots_used() == 0


# versions


async def test_versions_only_rise_and_concurrent_posts_end_at_the_maximum(engine: Engine, service: MakeService) -> None:
    live = await service()
    assert await live.version() == 0
    assert await live.bump(7) == {"version": 7, "previous": 0, "stale_groups": 0, "aborted_rollouts": 0}
    assert await live.bump(7) == {"version": 7, "previous": 7, "stale_groups": 0, "aborted_rollouts": 0}
    lower = await live.post_version(6)
    assert lower.status_code == 409
    assert lower.json()["type"] == "/problems/conflict"
    assert await live.version() == 7
    posted = [8, 30, 9, 31, 10, 29, 31, 11]
    answers = await asyncio.gather(*(live.post_version(version) for version in posted))
    for version, answer in zip(posted, answers, strict=True):
        assert answer.status_code in (200, 409)
        if answer.status_code == 200:
            assert answer.json()["version"] == version
            assert answer.json()["previous"] <= version
    assert await live.version() == 31
    assert await live.metric("rollout_policy_version") == 31


@pytest.mark.parametrize("version", ["7", 7.0, 7.5, True, None, -1, 2**53, [7]])
async def test_what_is_no_version_is_refused_and_changes_nothing(service: MakeService, version: object) -> None:
    live = await service()
    answer = await live.post_version(version)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert await live.version() == 0


async def test_an_equal_version_disturbs_nobody(engine: Engine, service: MakeService) -> None:
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    await live.bump(3)
    await live.submit(prompt("A"))
    await engine.holding(4)
    await asyncio.gather(*(live.bump(3) for _ in range(5)))
    await live.bump(3, reset=True)
    assert len(engine.in_flight()) == 4
    engine.release()
    assert (await live.collect(1))[0]["staleness"] == 0


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
async def test_a_reset_takes_every_opened_group_back_to_pending_and_voids_all_leases(
    engine: Engine, service: MakeService, on_stale: str
) -> None:
    engine.on("p:generating;", lambda a: Act(hold=a.nth < 4))
    live = await service(groups={"on_stale": on_stale, "max_group_attempts": 1}, reward_workers={"processes": 2})
    await live.bump(5)
    leased, acked = await live.submit(prompt("leased"), prompt("acked"))
    await live.wait_state(leased, "ready")
    await live.wait_state(acked, "ready")
    lease = await live.pull(2, min_groups=2, request_id="r")
    assert (await live.ack(lease["lease_id"], [acked])).status_code == 200
    others = await live.submit(prompt("generating"), prompt("scoring", mode="sleep"), prompt("ready"))
    for group_id, state in zip(others, ("generating", "scoring", "ready"), strict=True):
        await live.wait_state(group_id, state)
    await engine.holding(4, "p:generating;")
    await live.http.post("/pause")
    bumped = await live.bump(2, reset=True)
    assert (bumped["version"], bumped["previous"], bumped["aborted_rollouts"]) == (2, 5, 4)
    states = [await live.state(group_id) for group_id in (leased, *others)]
    assert states == ["pending"] * 4
    assert (await live.ack(lease["lease_id"], [leased])).status_code == 409
    assert (await live.ack(lease["lease_id"])).status_code == 409
    assert (await live.http.post(f"/leases/{lease['lease_id']}/renew", json={})).status_code == 409
    assert (await live.lease(2, min_groups=2, request_id="r")).status_code == 409
    assert await live.state(acked) == "acked"
    assert await live.metric(STALE) == 0
    await live.http.delete(f"/groups/{others[1]}")
    await live.http.post("/resume")
    again = await live.collect(3)
    assert {group["prompt_id"] for group in again} == {"leased", "generating", "ready"}
    assert {group["policy_version"] for group in again} == {2}
    assert {len(group["samples"]) for group in again} == {4}, "whole prompts, no attempt used up"
    assert {(await live.group(group["group_id"]))["tries"] for group in again} == {1}


async def test_a_reset_gives_a_smaller_rest_all_its_rows_back(engine: Engine, service: MakeService) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 2})
    await live.submit(prompt("A", 6))
    await engine.holding(2)
    await live.bump(3)
    await until(lambda: len(engine.find()) == 4 and len(engine.in_flight()) == 2)
    engine.on("p:A;", Act())
    await live.bump(1, reset=True)
    (group,) = await live.collect(1)
    assert [sample["index"] for sample in group["samples"]] == [0, 1, 2, 3, 4, 5]
    assert group["policy_version"] == 1


async def test_reset_with_a_higher_version_is_a_plain_bump(engine: Engine, service: MakeService) -> None:
    live = await service(groups={"max_staleness": 1})
    (a,) = await live.submit(prompt("A"))
    await live.wait_state(a, "ready")
    lease = await live.pull(1)
    await live.bump(1, reset=True)
    assert await live.state(a) == "leased"
    assert (await live.ack(lease["lease_id"])).status_code == 200


async def test_two_bumps_and_a_delete_at_once_free_every_slot_exactly_once(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 21."""
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 32})
    version = 0
    for round_ in range(10):
        groups = await live.submit(*(prompt(f"{round_}.{number}") for number in range(8)))
        await engine.holding(32)
        calls = [live.post_version(version + 1), live.post_version(version + 2)]
        calls += [live.http.delete(f"/groups/{group_id}") for group_id in groups[:3]]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} <= {200, 409}
        version += 2
        assert await live.version() == version
        assert await live.slots_used() == 0
        await live.counts()
        await engine.holding(0)
    for name, wanted in (("rollout_inflight_rollouts", 0), ("rollout_slots", 32)):
        assert await live.metric(name) == wanted
    engine.on(None, Act())
    await live.submit(*(prompt(f"after{number}") for number in range(20)))
    assert len(await live.collect(20)) == 20


async def test_all_work_going_stale_is_told_and_delivery_begins_when_the_bumps_pause(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 8."""
    engine.on(None, Act(hold=True))
    live = await service(groups={"max_staleness": 0, "on_stale": "requeue", "max_group_attempts": 1000})
    await live.submit(*(prompt(f"A{number}") for number in range(4)))
    for version in range(1, 7):
        await until(lambda version=version: len(engine.attempts) == 16 * version)
        await engine.holding(16)
        await live.bump(version)
    engine.on(None, Act())
    await until(lambda: len(engine.attempts) == 7 * 16)
    engine.release()
    assert await live.metric(STALE) == 24
    groups = await live.collect(4)
    assert {group["policy_version"] for group in groups} == {6}
    assert len(engine.attempts) == 7 * 16, "no spinning: one dispatch of each row a version"


async def _finished(live: object, group_id: str, count: int) -> bool:
    return len((await live.group(group_id))["rows"]["finished"]) == count  # type: ignore[attr-defined]  # typed as object
