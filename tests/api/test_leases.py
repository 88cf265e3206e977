"""Leases over a real connection: waiting, hanging up, what is delivered."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from typing import Any

import pytest

from rollout_service.core.model import FinishedRollout, FinishReason, RolloutJob, Scores, Turn
from tests.api.conftest import Service, settings_with
from tests.fakes import Runner, failed, finished, until


def at_once() -> Runner:
    return Runner(answer=lambda job: finished(job.index))


def strict(content: bytes) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(content.decode("utf-8"), parse_constant=refuse)


async def hang_up(service: Service, body: dict[str, Any], when: Any) -> None:
    """Ask for a lease on a connection of its own, and cut it once `when()` is true."""
    content = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"POST /leases HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content))
    await until(when, "the call")
    writer.transport.abort()


def waiting(service: Service) -> int:
    return service.door.status().waiting_lease_calls


async def test_a_waiting_call_wakes_up_when_a_group_is_ready(live: Service):
    (group_id,) = await live.submit("a")
    call = asyncio.create_task(live.post("/leases", {"max_groups": 8, "wait_s": 60}))
    await until(lambda: waiting(live) == 1)
    await until(lambda: len(live.runner.held) == 4)
    live.runner.release()
    lease = (await call).json()
    assert [group["group_id"] for group in lease["groups"]] == [group_id]
    assert lease["status"] == "ok"


async def test_nothing_in_time_is_empty_and_nothing_more_to_come_is_exhausted(service: Service):
    answer = await service.post("/leases", {"max_groups": 8, "wait_s": 0})
    expected = {"lease_id": None, "expires_at": None, "policy_version": 0, "outstanding": 0, "groups": []}
    assert strict(answer.content) == {"status": "empty"} | expected
    assert (await service.post("/prompts", {"prompts": [], "final": True})).json() == {"groups": []}
    answer = await service.post("/leases", {"max_groups": 8, "wait_s": 60})
    assert strict(answer.content) == {"status": "exhausted"} | expected


async def test_a_caller_that_hangs_up_while_it_waits_costs_no_group(live: Service):
    await hang_up(live, {"max_groups": 8, "wait_s": 60}, lambda: waiting(live) == 1)
    await until(lambda: waiting(live) == 0, "its place in the line is free")
    (group_id,) = await live.submit("a")
    await until(lambda: len(live.runner.held) == 4)
    live.runner.release()
    lease = (await live.post("/leases", {"max_groups": 8, "wait_s": 10})).json()
    assert [group["group_id"] for group in lease["groups"]] == [group_id]


@pytest.mark.parametrize("request_id", [None, "step-1"])
async def test_a_caller_that_hangs_up_before_the_answer_is_out_loses_nothing(live: Service, request_id, monkeypatch):
    """Without a request id the groups are free at once; with one they wait for it."""
    live.runner.answer = lambda job: finished(job.index)
    entered, gone = asyncio.Event(), asyncio.Event()
    lease_of = live.door.lease

    async def slow(*args: Any) -> Any:
        answer = await lease_of(*args)
        entered.set()
        await gone.wait()
        return answer

    monkeypatch.setattr(live.door, "lease", slow)
    await live.submit("a")
    body = {"max_groups": 8, "wait_s": 10} | ({"request_id": request_id} if request_id else {})
    await hang_up(live, body, entered.is_set)
    await until(lambda: live.connections() == 1, "the server sees the end of the connection")
    gone.set()
    monkeypatch.setattr(live.door, "lease", lease_of)
    if request_id is None:
        await until(lambda: live.door.status().leases == 0, "the lease is over")
    again = await live.post("/leases", body)
    lease = strict(again.content)
    assert [group["prompt_id"] for group in lease["groups"]] == ["a"]


async def test_what_is_leased_is_exact(service: Service):
    ids, logprobs = array("i", (5, 2**31 - 1)), array("f", (-0.1, -1e-30))

    def made(job: RolloutJob) -> Any:
        if job.index == 1:
            return failed(1)
        turn = Turn(
            prompt_ids=array("i", (7, 8, 9)),
            output_ids=ids,
            logprobs=logprobs,
            finish_reason=FinishReason.LENGTH if job.index == 2 else FinishReason.STOP,
            text="ü\u0000🙂",
            weight_versions=({"version": "3", "start": 0, "end": 2},) if job.index == 3 else (),
            engine="http://engine",
        )
        return FinishedRollout(
            index=job.index,
            prompt="p",
            completion="ü\u0000🙂",
            turns=(turn,),
            metrics={"duration_s": 1, "odd": math.nan},
            logprobs_mode="processed_logprobs",
        )

    service.runner.answer = made
    service.scorer.answer = lambda job: Scores(rewards={"accuracy": [1.0, None, 3.0]})
    await service.post("/policy_version", {"version": 7})
    row = {"prompt_id": "a", "prompt": "p", "epoch": 2, "columns": {"d": [1, None, "ü"]}, "sampling": {"max_tokens": 9}}
    await service.post("/prompts", {"prompts": [row]})
    await until(lambda: service.door.status().counts.groups["ready"] == 1)
    await service.post("/policy_version", {"version": 8})
    lease = strict((await service.post("/leases", {"max_groups": 1, "lease_s": 60, "wait_s": 10})).content)
    assert lease["policy_version"] == 8
    assert lease["expires_at"] == "1970-01-12T13:47:40.000Z"  # the clock's 1,000,000 s, and 60
    (group,) = lease["groups"]
    samples = group.pop("samples")
    sampling = group.pop("sampling")
    assert sampling["max_tokens"] == 9
    assert sampling["temperature"] == 1.0
    assert group == {
        "group_id": "g-1",
        "prompt_id": "a",
        "epoch": 2,
        "attempt": 1,
        "num_generations": 4,
        "policy_version": 7,
        "staleness": 1,
        "zero_variance": False,
        "reward_mean": 2.0,
        "reward_std": 1.0,
        "columns": {"d": [1, None, "ü"]},
        "logprobs_mode": "processed_logprobs",
    }
    assert [sample["rollout_id"] for sample in samples] == ["g-1.1.0", "g-1.1.2", "g-1.1.3"]
    assert [sample["index"] for sample in samples] == [0, 2, 3]
    assert [sample["reward"] for sample in samples] == [1.0, None, 3.0]
    assert [sample["scored"] for sample in samples] == [True, False, True]
    assert [sample["truncated"] for sample in samples] == [False, True, False]
    assert samples[1]["advantage"] == 0
    assert "weight_versions" not in samples[0]
    assert samples[2]["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    first = samples[0]
    assert first["input_ids"] == [7, 8, 9, *ids]
    assert first["completion_mask"] == [0, 0, 0, 1, 1]
    assert first["old_log_probs"] == [0.0, 0.0, 0.0, *logprobs.tolist()]
    assert first["completion"] == "ü\u0000🙂"
    assert first["metrics"] == {"duration_s": 1.0}
    assert first["rewards"] == {"accuracy": 1.0}


async def test_a_rollout_whose_history_was_rewritten_gives_several_samples_that_share_its_score(service: Service):
    def turn(prompt: tuple[int, ...], output: tuple[int, ...]) -> Turn:
        return Turn(
            prompt_ids=array("i", prompt),
            output_ids=array("i", output),
            logprobs=array("f", (-1.0,) * len(output)),
            finish_reason=FinishReason.STOP,
            text="t",
            engine="http://engine",
        )

    turns = (turn((1,), (2,)), turn((1, 2, 3), (4,)), turn((9,), (5,)))
    service.runner.answer = lambda job: FinishedRollout(index=job.index, prompt="p", completion="c", turns=turns)
    await service.submit("a")
    lease = strict((await service.post("/leases", {"max_groups": 1, "wait_s": 10})).content)
    samples = [sample for sample in lease["groups"][0]["samples"] if sample["index"] == 3]
    assert [sample["input_ids"] for sample in samples] == [[1, 2, 3, 4], [9, 5]]
    assert [sample["completion_mask"] for sample in samples] == [[0, 1, 0, 1], [0, 1]]
    assert {sample["rollout_id"] for sample in samples} == {"g-1.1.3"}
    assert {sample["reward"] for sample in samples} == {3.0}


async def test_a_long_sample_crosses_pieces_and_chunks_unharmed(live: Service):
    tokens = array("i", range(100_000))
    turn = Turn(
        prompt_ids=array("i", (1,)),
        output_ids=tokens,
        logprobs=array("f", (-0.25,) * len(tokens)),
        finish_reason=FinishReason.STOP,
        text="x",
        engine="http://engine",
    )
    live.runner.answer = lambda job: FinishedRollout(index=job.index, prompt="p", completion="x", turns=(turn,))
    await live.submit("a", "b")
    lease = strict((await live.post("/leases", {"max_groups": 2, "min_groups": 2, "wait_s": 30})).content)
    for group in lease["groups"]:
        for sample in group["samples"]:
            assert sample["input_ids"] == [1, *tokens]
            assert len(sample["old_log_probs"]) == len(sample["completion_mask"]) == 100_001


async def test_ack_release_and_renew_answer_what_they_did():
    async with Service(runner=at_once()).in_process() as service:
        ids = await service.submit("a", "b", "c")
        body = {"max_groups": 8, "min_groups": 3, "wait_s": 10, "request_id": "r"}
        first = await service.post("/leases", body)
        lease = first.json()
        assert (await service.post("/leases", body)).json() == lease, "the same id gets the same lease"
        path = f"/leases/{lease['lease_id']}"
        service.clock.now += 10
        renewed = (await service.post(f"{path}/renew", {"lease_s": 900})).json()
        assert renewed == {"lease_id": lease["lease_id"], "expires_at": "1970-01-12T14:01:50.000Z"}
        for _ in range(2):
            acked = (await service.post(f"{path}/ack", {"group_ids": ids[:1]})).json()
            assert acked == {"lease_id": lease["lease_id"], "acked": ids[:1]}
        released = (await service.post(f"{path}/release", {"group_ids": ids[1:2]})).json()
        assert released == {"lease_id": lease["lease_id"], "released": ids[1:2]}
        assert (await service.http.get(f"/groups/{ids[0]}")).json()["acked_by"] == lease["lease_id"]
        assert (await service.post(f"{path}/ack", {"group_ids": ["g-99"]})).status_code == 404
        assert (await service.post("/leases", body | {"max_groups": 7})).status_code == 409


async def test_min_groups_above_the_pace_bound_is_refused():
    settings = settings_with(
        groups={"num_generations": 4, "max_staleness": 1}, dispatch={"admission": "pace", "groups_per_step": 2}
    )
    async with Service(settings=settings).in_process() as service:
        answer = await service.post("/leases", {"max_groups": 8, "min_groups": 5, "wait_s": 0})
        assert answer.status_code == 422
        assert "pace" in answer.json()["detail"]
        assert (await service.post("/leases", {"max_groups": 8, "min_groups": 4, "wait_s": 0})).status_code == 200
