"""A rollout that fails costs itself; a group that fails whole is said aloud; the service goes on."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine, Rule, answers, says
from tests.service import prompt, trained_ids, trained_text

REFUSED = Act(status=400, message="unlucky prompt 4711")


def fails_first(count: int) -> Rule:
    return lambda attempt: REFUSED if attempt.nth < count else says(attempt.nth / 4, f"a{attempt.seq}")


async def test_a_failed_rollout_is_left_out_and_everything_is_trimmed_and_aligned_to_the_survivors(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", fails_first(1))
    live = await service()
    await live.submit(prompt("A", difficulty=3, tag="x", nested={"a": [1]}))
    (group,) = await live.collect(1)
    samples = group["samples"]
    assert len(samples) == 3
    assert (group["prompt_id"], group["num_generations"], group["columns"]["nested"]) == ("A", 4, {"a": [1]})
    (call,) = live.reward_calls()
    assert [len(call[name]) for name in ("prompts", "completions", "ids")] == [3, 3, 3]
    assert call["columns"] == {"difficulty": [3] * 3, "tag": ["x"] * 3, "nested": [{"a": [1]}] * 3}
    assert [bytes(ids).decode() for ids in call["ids"]] == call["completions"]
    assert call["ids"] == [trained_ids(sample) for sample in samples], "row i of the call is survivor i"
    assert {trained_text(sample) for sample in samples} == {f"r={a.nth / 4};a{a.seq}" for a in engine.attempts[1:]}
    for sample in samples:
        said = float(trained_text(sample)[2:].partition(";")[0])
        assert sample["reward"] == sample["rewards"]["accuracy"] == said
        assert sample["input_ids"][:4] == list(b"p:A;")
    rewards = [sample["reward"] for sample in samples]
    assert group["reward_mean"] == pytest.approx(sum(rewards) / 3), "a failed rollout is no reward 0"
    assert sum(sample["advantage"] for sample in samples) == pytest.approx(0, abs=1e-6)
    assert await live.metric("rollout_failed_total", 'reason="rejected"') == 1
    assert await live.metric("rollout_failed_total") == 1
    assert await live.metric("rollout_dropped_groups_total") == 0
    assert live.logged("rollout_failed")[0]["error"].endswith("unlucky prompt 4711")


async def test_two_survivors_are_a_group(engine: Engine, service: MakeService) -> None:
    engine.on("p:A;", fails_first(2))
    live = await service()
    await live.submit(prompt("A"))
    (group,) = await live.collect(1)
    assert sorted(sample["advantage"] for sample in group["samples"]) == pytest.approx([-1, 1], abs=1e-3)


async def test_a_single_survivor_is_dropped_unscored_and_the_service_goes_on(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", fails_first(3))
    live = await service()
    (group_id,) = await live.submit(prompt("A"))
    group = await live.wait_state(group_id, "dropped")
    assert group["reason"] == "too_few_survivors"
    assert "unlucky prompt 4711" in group["error"]
    assert live.reward_calls() == []
    assert await live.metric("rollout_dropped_groups_total", 'reason="too_few_survivors"') == 1
    assert await live.probe("/readyz") == 200
    await live.submit(prompt("B"))
    assert (await live.collect(1))[0]["prompt_id"] == "B"


async def test_a_group_of_one_survivor_is_delivered_where_min_group_size_is_one(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", fails_first(3))
    live = await service(groups={"min_group_size": 1, "advantage": "none"})
    await live.submit(prompt("A"))
    (sample,) = (await live.collect(1))[0]["samples"]
    assert sample["reward"] == sample["advantage"] == 0.75


@pytest.mark.parametrize("act", [REFUSED, Act(status=500, message="unlucky prompt 4711")], ids=["400", "500"])
async def test_an_all_failed_group_halts_loudly_and_resume_goes_on_without_a_restart(
    engine: Engine, service: MakeService, act: Act
) -> None:
    engine.on("p:A;", act)
    live = await service()
    (failed,) = await live.submit(prompt("A"))
    group = await live.wait_state(failed, "failed")
    assert "unlucky prompt 4711" in group["error"]
    assert group["engine"] == engine.url
    assert {row["error"][-19:] for row in group["rollouts"]} == {"unlucky prompt 4711"}
    answer = await live.http.get("/readyz")
    assert answer.status_code == 503
    assert "unlucky prompt 4711" in answer.text
    assert await live.probe("/livez") == 200
    answer = await live.lease(wait_s=10)
    assert answer.status_code == 503
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert answer.json()["type"] == "/problems/halted"
    for fact in ("unlucky prompt 4711", failed, engine.url):
        assert fact in answer.json()["detail"]
    halted = (await live.status())["halted"]
    assert (halted["group_id"], halted["engine"]) == (failed, engine.url)
    assert "unlucky prompt 4711" in halted["error"]
    assert await live.metric("rollout_halts_total") == 1
    (waiting,) = await live.submit(prompt("B"))  # taken, but not dispatched while halted
    assert await live.state(waiting) == "pending"
    assert engine.find("p:B;") == []
    assert (await live.http.post("/resume")).status_code == 200
    await live.wait_ready()  # after 500s the engine is out until a probe succeeds
    assert (await live.collect(1))[0]["prompt_id"] == "B"
    assert await live.state(failed) == "failed"
    assert await live.metric("rollout_failed_groups_total") == 1
    assert await live.metric("rollout_failed_total") == 4


async def test_a_lease_call_that_waits_when_the_service_halts_is_answered_at_once(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", Act(hold=True, status=400, message="unlucky prompt 4711"))
    live = await service()
    await live.submit(prompt("A"))
    waiting = asyncio.create_task(live.lease(wait_s=60))
    await engine.holding(4)
    engine.release()
    answer = await asyncio.wait_for(waiting, 15)
    assert answer.status_code == 503
    assert "unlucky prompt 4711" in answer.text


async def test_ready_groups_and_those_in_flight_are_still_leased_while_halted(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:bad;", REFUSED)
    engine.on("p:slow;", Act(hold=True))
    live = await service()
    good, slow = await live.submit(prompt("good"), prompt("slow"))
    await live.wait_state(good, "ready")
    (bad,) = await live.submit(prompt("bad"))
    await live.wait_state(bad, "failed")
    assert [g["group_id"] for g in (await live.pull())["groups"]] == [good]
    engine.release("p:slow;")
    await live.wait_state(slow, "ready")
    assert [g["group_id"] for g in (await live.pull(min_groups=5))["groups"]] == [slow], "what is left is enough"
    assert (await live.lease(wait_s=0)).status_code == 503


async def test_a_retry_is_not_sent_while_halted(engine: Engine, service: MakeService) -> None:
    engine.on("p:bad;", Act(hold=True, status=400))
    engine.on("p:slow;", lambda a: Act(hold=True, status=503) if a.nth < 4 else Act())
    live = await service(dispatch={"max_attempts": 3})
    bad, slow = await live.submit(prompt("bad"), prompt("slow"))
    await engine.holding(8)
    engine.release("p:bad;")
    await live.wait_state(bad, "failed")
    engine.release("p:slow;")
    (other,) = await live.submit(prompt("other"))  # a commit and several turns of the loop later
    await asyncio.sleep(0.5)  # the first retry would come after 0.1 s at most
    assert len(engine.find("p:slow;")) == 4
    assert await live.state(other) == "pending"
    await live.http.post("/resume")
    assert {g["prompt_id"] for g in await live.collect(2)} == {"slow", "other"}
    assert await live.state(slow) == "acked"


async def test_a_group_that_becomes_ready_ends_the_row_of_failed_ones(engine: Engine, service: MakeService) -> None:
    engine.on("p:bad", REFUSED)
    live = await service(groups={"halt_after_failed_groups": 2})
    for number in range(2):
        bad, good = await live.submit(prompt(f"bad{number}"), prompt(f"good{number}"))
        await live.wait_state(bad, "failed")
        await live.wait_state(good, "ready")
    assert (await live.status())["halted"] is None
    for number in (2, 3):
        (bad,) = await live.submit(prompt(f"bad{number}"))
        await live.wait_state(bad, "failed")
    assert (await live.status())["halted"]["group_id"] == bad


async def test_zero_means_that_failed_groups_never_halt(engine: Engine, service: MakeService) -> None:
    engine.on("p:bad", REFUSED)
    live = await service(groups={"halt_after_failed_groups": 0, "halt_after_unproductive_groups": 0})
    groups = await live.submit(*(prompt(f"bad{number}") for number in range(40)))
    for group_id in groups:
        await live.wait_state(group_id, "failed")
    assert (await live.status())["halted"] is None
    await live.submit(prompt("good"))
    assert len(await live.collect(1)) == 1


async def test_unproductive_groups_in_a_row_halt_and_zero_variance_ones_do_not_count(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:lone", lambda a: REFUSED if a.nth < 3 else Act())
    engine.on("p:same", says(1.0))
    live = await service(groups={"halt_after_unproductive_groups": 3, "zero_variance": "drop"})
    for key in ("lone0", "same0", "same1", "same2", "same3", "lone1"):
        (group_id,) = await live.submit(prompt(key))
        await live.wait_state(group_id, "dropped")
    assert (await live.status())["halted"] is None
    (last,) = await live.submit(prompt("lone2"))
    await live.wait_state(last, "dropped")
    halted = (await live.status())["halted"]
    assert halted["group_id"] == last
    assert "unlucky prompt 4711" in halted["error"]


async def test_a_refusal_is_tried_once_and_a_failing_engine_at_most_max_attempts_times(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:refused;", REFUSED)
    engine.on("p:ill;", lambda a: Act(status=503, message="paused") if a.nth < 4 * 2 else Act())
    engine.on("p:dead;", Act(status=429, message="never"))
    live = await service(dispatch={"max_attempts": 3}, groups={"halt_after_failed_groups": 0})
    refused, ill, dead = await live.submit(prompt("refused"), prompt("ill"), prompt("dead"))
    assert (await live.collect(1))[0]["group_id"] == ill
    await live.wait_state(refused, "failed")
    await live.wait_state(dead, "failed")
    assert len(engine.find("p:refused;")) == 4
    assert len(engine.find("p:ill;")) == len(engine.find("p:dead;")) == 12
    assert await live.metric("rollout_failed_total", 'reason="server_error"') == 4
    assert await live.metric("rollout_retries_total") == 16


async def test_an_odd_failure_in_three_of_many_groups_leaves_the_others_alone(
    engine: Engine, service: MakeService
) -> None:
    """Public fault 2: nothing is frozen by a task that died in an unusual way."""
    engine.on("p:garbage;", answers(body=b"{" * 3000))
    live = await service(groups={"halt_after_failed_groups": 0})
    rows = [prompt(f"good{number}") for number in range(29)]
    odd = [prompt("garbage"), prompt("exit", mode="exit"), prompt("die", mode="die")]
    groups = await live.submit(*rows[:10], *odd, *rows[10:])
    assert len(await live.collect(29)) == 29
    for group_id in groups[10:13]:
        await live.wait_state(group_id, "failed", "dropped")
    counts = await live.counts()
    assert (counts["acked"], counts["failed"], counts["dropped"]) == (29, 1, 2)


async def test_one_held_rollout_keeps_no_other_group_and_its_deadline_closes_it_at_the_engine(
    engine: Engine, service: MakeService
) -> None:
    """Public faults 5 and 6."""
    engine.on("p:slow;", lambda a: Act(hold=a.nth == 0))
    live = await service(dispatch={"rollout_timeout_s": 1.5})
    slow, _ = await live.submit(prompt("slow"), prompt("fast"))
    assert (await live.collect(1))[0]["prompt_id"] == "fast"
    (held,) = await engine.holding(1)
    oldest = (await live.status())["oldest_outstanding"]
    assert oldest["group_id"] == slow
    assert oldest["age_s"] >= 0
    (running,) = [row for row in (await live.group(slow))["rollouts"] if row["state"] == "running"]
    assert running["in_flight_s"] > 0
    assert len((await live.collect(1))[0]["samples"]) == 3
    assert held.left is not None
    assert await live.metric("rollout_failed_total", 'reason="deadline"') == 1
