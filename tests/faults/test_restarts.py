"""`kill -9` of the real process: no prompt is lost, nothing acked comes again, the version and a pause are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.conftest import MakeProcess
from tests.faults.scripted import Act, Engine, says
from tests.service import prompt, trained_text, until


@pytest.mark.timeout(180)
async def test_a_kill_in_the_middle_keeps_version_leases_finished_rollouts_ready_groups_and_acks(
    engine: Engine, process: MakeProcess
) -> None:
    engine.on("p:half;", lambda a: says(a.nth / 8, f"first{a.nth}", hold=a.nth >= 2))
    engine.on("p:held;", Act(hold=True))
    svc = await process(groups={"max_staleness": 1}, dispatch={"max_inflight_rollouts": 32})
    await svc.bump(20)
    acked, leased, ready = await svc.submit(prompt("acked"), prompt("leased"), prompt("ready"))
    for group_id in (acked, leased, ready):
        await svc.wait_state(group_id, "ready")
    first = await svc.pull(1, request_id="step-0")
    assert (await svc.ack(first["lease_id"])).status_code == 200
    lease = await svc.pull(1, request_id="step-1", lease_s=600)
    half, held, pending = await svc.submit(prompt("half"), prompt("held"), prompt("pending", 24) | {"epoch": 3})
    await until(lambda: len(engine.find("p:half;")) == 4 and len(engine.in_flight("p:half;")) == 2)
    await until(lambda: _finished(svc, half, 2))
    asked = [attempt.asked.request_id for attempt in engine.attempts]

    await svc.kill()
    engine.on("p:half;", lambda a: says(a.nth / 8, f"again{a.nth}"))
    engine.on("p:held;", Act())
    await svc.start()

    assert await svc.version() == 20
    assert [await svc.state(group_id) for group_id in (acked, leased)] == ["acked", "leased"]
    again = await svc.pull(1, request_id="step-1", lease_s=600)
    assert again["lease_id"] == lease["lease_id"]
    assert again["groups"] == lease["groups"], "the same content after the kill"
    assert (await svc.lease(1, request_id="step-0")).status_code == 409
    assert (await svc.ack(first["lease_id"])).status_code == 200, "an ack is known for ever"
    assert (await svc.ack(lease["lease_id"])).status_code == 200
    groups = {group["group_id"]: group for group in await svc.collect(4)}
    assert groups.keys() == {ready, half, held, pending}, "no prompt lost, no acked group again"
    texts = [trained_text(sample) for sample in groups[half]["samples"]]
    assert sum("first" in text for text in texts) == 2, "finished rollouts are kept"
    assert sum("again" in text for text in texts) == 2, "those in flight are generated again"
    assert [sample["index"] for sample in groups[half]["samples"]] == [0, 1, 2, 3]
    assert {group["policy_version"] for group in groups.values()} == {20}
    assert groups[pending]["epoch"] == 3
    assert await svc.submit(prompt("acked"), prompt("half")) == [acked, half], "identities are known"
    counts = await svc.counts()
    assert (counts["submitted"], counts["acked"]) == (6, 6)
    assert len({*asked, *(attempt.asked.request_id for attempt in engine.attempts)}) == len(engine.attempts)
    bumped = await svc.bump(21)
    assert (bumped["previous"], bumped["stale_groups"]) == (20, 0)


@pytest.mark.timeout(180)
async def test_a_rest_a_pause_and_final_survive_and_the_bound_on_staleness_holds_after_the_kill(
    engine: Engine, process: MakeProcess
) -> None:
    """Public fault 27, and the partly dispatched group with a restart in between."""
    engine.on("p:A;", lambda a: says(a.nth, "old", hold=a.nth != 1))
    svc = await process(groups={"max_staleness": 0}, dispatch={"max_inflight_rollouts": 3})
    (a,) = await svc.submit(prompt("A", 8), final=True)
    await until(lambda: len(engine.find("p:A;")) == 4 and len(engine.in_flight()) == 3)
    await svc.http.post("/pause")
    await svc.bump(1)  # rows 0 to 3 are gone, one of them finished; 4 to 7 wait
    await svc.kill()
    engine.on("p:A;", lambda x: says(x.nth, "new", hold=True))
    await svc.start()
    assert (await svc.status())["paused"] is True
    assert (await svc.group(a))["rows"]["waiting"] == [4, 5, 6, 7]
    assert len(engine.attempts) == 4, "paused"
    await svc.http.post("/resume")
    await until(lambda: len(engine.in_flight()) == 3)
    await svc.kill()
    engine.on("p:A;", lambda x: says(x.nth, "new"))
    await svc.start()
    (group,) = await svc.collect(1)
    assert [sample["index"] for sample in group["samples"]] == [4, 5, 6, 7], "rows that were used up stay so"
    assert {trained_text(sample)[-3:] for sample in group["samples"]} == {"new"}
    assert group["policy_version"] == 1
    assert (await svc.pull(wait_s=0))["status"] == "exhausted"
    assert (await svc.post_prompts(prompt("B"))).status_code == 409


@pytest.mark.timeout(180)
async def test_scoring_starts_again_after_a_kill_and_the_file_goes_on_at_the_next_row(
    engine: Engine, process: MakeProcess, tmp_path: Path
) -> None:
    rows = [{"prompt_id": f"row{number}", "prompt": f"p:row{number};", "mode": "sleep"} for number in range(6)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    svc = await process(prompts={"path": str(path)}, reward_workers={"processes": 1})
    await until(lambda: _on_disk(svc, "scoring", 6))
    asked = len(engine.attempts)
    await svc.kill()
    rewards = svc.directory / "fault_rewards.py"
    # Of another length: the same length within the same second, and Python takes what it had compiled for the same.
    rewards.write_text(rewards.read_text().replace('if mode == "sleep":', 'if mode == "sleeps no more":'))
    await svc.start()
    groups = await svc.collect(6)
    assert sorted(group["prompt_id"] for group in groups) == [row["prompt_id"] for row in rows]
    assert len(engine.attempts) == asked, "nothing was generated again"
    assert (await svc.pull(wait_s=0))["status"] == "exhausted"


@pytest.mark.timeout(180)
async def test_with_pace_leased_groups_count_after_a_kill_too(engine: Engine, process: MakeProcess) -> None:
    svc = await process(
        groups={"max_staleness": 1}, dispatch={"admission": "pace", "groups_per_step": 2, "max_inflight_rollouts": 64}
    )
    await svc.submit(*(prompt(f"A{number}") for number in range(20)))
    await until(lambda: _in_state(svc, "ready", 4))
    lease = await svc.pull(2, request_id="r")
    await svc.kill()
    await svc.start()
    counts = await svc.counts()
    assert (counts["leased"], counts["ready"], counts["generating"], counts["scoring"]) == (2, 2, 0, 0)
    assert (await svc.status())["blocked"] == "pace"
    assert (await svc.ack(lease["lease_id"])).status_code == 200
    assert len(engine.attempts) == 16


@pytest.mark.timeout(180)
async def test_kill_after_kill_while_a_trainer_works_loses_nothing_and_repeats_nothing(
    engine: Engine, process: MakeProcess
) -> None:
    engine.on(None, Act(delay=0.02))
    svc = await process(groups={"max_staleness": 8, "on_stale": "requeue"}, dispatch={"max_inflight_rollouts": 8})
    submitted = await svc.submit(*(prompt(f"A{number}", 2) for number in range(40)), final=True)
    acked: list[str] = []
    step = 0
    for version, size in enumerate((3, 5, 7, 25), 1):
        for _ in range(size):
            lease = await svc.pull(1, 30, request_id=f"step-{step}")
            step += 1
            assert lease["status"] == "ok"
            ids = [group["group_id"] for group in lease["groups"]]
            assert (await svc.ack(lease["lease_id"])).status_code == 200
            assert not set(ids) & set(acked), "acked twice"
            acked += ids
        await svc.bump(version)
        if size != 25:
            await svc.kill()
            await svc.start()
            assert await svc.version() == version
    assert sorted(acked) == sorted(submitted)
    assert (await svc.pull(wait_s=10))["status"] == "exhausted"
    counts = await svc.counts()
    assert counts["acked"] == counts["submitted"] == 40


async def _finished(svc: object, group_id: str, count: int) -> bool:
    return len((await svc.group(group_id))["rows"]["finished"]) == count  # type: ignore[attr-defined]  # typed as object


async def _in_state(svc: object, state: str, count: int) -> bool:
    return bool((await svc.counts())[state] == count)  # type: ignore[attr-defined]  # typed as object


async def _on_disk(svc: object, state: str, count: int) -> bool:
    """The list shows what is committed; the counts of /status run ahead of the disk by a few milliseconds."""
    return len((await svc.http.get(f"/groups?state={state}")).json()["groups"]) == count  # type: ignore[attr-defined]  # typed as object
