"""What people see: status, groups, engines."""

from __future__ import annotations

import pytest

from tests.api.conftest import Service
from tests.fakes import Runner, failed, finished, until


async def test_status_has_the_identity_slots_and_the_oldest(service: Service):
    await service.submit("a", "b")
    await until(lambda: len(service.runner.held) == 8)
    service.clock.now += 12.5
    status = (await service.http.get("/status")).json()
    assert status["policy_version"] == 0
    assert status["max_staleness"] == 4
    assert status["submitted"] == sum(status["groups"].values()) == status["outstanding"] == 2
    assert status["groups"]["generating"] == 2
    assert len(status["groups"]) == 9
    assert status["slots"] == {"total": 128, "used": 8, "free": 120}
    assert status["oldest_outstanding"] == {"group_id": "g-1", "state": "generating", "age_s": 12.5}
    assert (status["paused"], status["halted"], status["final"]) == (False, None, False)
    assert status["store"] == {"ok": True, "error": None}
    assert status["engines"] == (await service.http.get("/engines")).json()["engines"]
    assert status["engines"][0]["id"] == "e0"


async def test_an_idle_service_has_no_oldest(service: Service):
    assert (await service.http.get("/status")).json()["oldest_outstanding"] is None


async def test_a_group_shows_every_rollout_wherever_it_stands(service: Service):
    service.runner.answer = lambda job: {0: finished(0), 1: failed(1)}.get(job.index)
    (group_id,) = await service.submit("a")
    await until(lambda: len(service.runner.held) == 2)
    await until(lambda: service.settled() == 2, "two rollouts are settled and committed")
    service.clock.now += 3
    group = (await service.http.get(f"/groups/{group_id}")).json()
    assert group["state"] == "generating"
    assert group["age_s"] == 3.0
    assert (group["attempt"], group["tries"], group["policy_version"], group["staleness"]) == (1, 1, 0, 0)
    assert group["rows"] == {"waiting": [], "running": [2, 3], "finished": [0], "failed": [1]}
    assert group["prompt"] == "p:a;"
    assert group["error"] == "unlucky prompt 4711"
    assert group["engine"] == "http://engine"
    done, broken, third, fourth = group["rollouts"]
    assert (done["state"], done["finish_reason"], done["tokens"], done["text"]) == ("finished", "stop", 3, "abc")
    assert (broken["state"], broken["reason"], broken["error"]) == ("failed", "rejected", "unlucky prompt 4711")
    assert (third["state"], fourth["state"]) == ("running", "running")
    assert third["in_flight_s"] >= 0
    service.runner.release()
    await until(lambda: service.door.status().counts.groups["ready"] == 1)
    group = (await service.http.get(f"/groups/{group_id}")).json()
    assert [row["reward"] for row in group["rollouts"]] == [0.0, None, 2.0, 3.0]


async def test_groups_come_in_pages_and_by_state():
    async with Service(runner=Runner(answer=lambda job: finished(job.index))).in_process() as service:
        ids = await service.submit("a", "b", "c")
        await until(lambda: service.door.status().counts.groups["ready"] == 3)
        first = (await service.http.get("/groups?limit=2")).json()
        assert [group["group_id"] for group in first["groups"]] == ids[:2]
        assert first["next"] == ids[1]
        second = (await service.http.get(f"/groups?limit=2&after={first['next']}")).json()
        assert [group["group_id"] for group in second["groups"]] == ids[2:]
        assert second["next"] is None
        cancelled = (await service.http.delete(f"/groups/{ids[0]}")).json()
        assert (cancelled["state"], cancelled["reason"]) == ("dropped", "cancelled")
        again = await service.http.delete(f"/groups/{ids[0]}")
        assert again.status_code == 409
        for query, expected in (
            ("state=dropped", ids[:1]),
            ("state=ready", ids[1:]),
            ("state=ready&state=dropped", ids),
            ("state=ready,dropped", ids),
            ("state=acked", []),
        ):
            page = (await service.http.get(f"/groups?{query}")).json()
            assert [group["group_id"] for group in page["groups"]] == expected


async def test_checkpoints_are_listed_returned_to_and_let_go():
    async with Service(runner=Runner(answer=lambda job: finished(job.index))).in_process() as service:
        made = (await service.post("/checkpoints", {"name": "step-400"})).json()
        assert (made["name"], made["policy_version"], made["ended_groups"]) == ("step-400", 0, 0)
        (group_id,) = await service.submit("a")
        lease = (await service.post("/leases", {"max_groups": 1, "wait_s": 10})).json()
        await service.post(f"/leases/{lease['lease_id']}/ack")
        await service.post("/policy_version", {"version": 5})
        rewound = (await service.post("/rewind", {"name": "step-400"})).json()
        assert (rewound["version"], rewound["previous"], rewound["reopened_groups"]) == (0, 5, 1)
        lease = (await service.post("/leases", {"max_groups": 1, "wait_s": 10})).json()
        assert [group["group_id"] for group in lease["groups"]] == [group_id]
        assert [mark["name"] for mark in (await service.http.get("/checkpoints")).json()["checkpoints"]] == ["step-400"]
        assert (await service.http.delete("/checkpoints/step-400")).status_code == 204
        assert (await service.http.get("/checkpoints")).json() == {"checkpoints": []}
        assert (await service.post("/rewind", {"name": "step-400"})).status_code == 404


@pytest.mark.parametrize("name", ["run/step-1", "/", ".", ".."])
async def test_a_checkpoint_that_could_not_be_named_in_a_path_is_refused(name: str):
    async with Service().in_process() as service:
        answer = await service.post("/checkpoints", {"name": name})
        assert answer.status_code == 422
        assert "it stands in a path" in answer.text
        assert (await service.http.get("/checkpoints")).json() == {"checkpoints": []}
