"""Every refusal is one problem document of its type."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from rollout_service.api.problems import problem_of
from rollout_service.core.model import GroupState
from rollout_service.errors import BodyTooLarge, QueueFull, StoreUnavailable
from tests.api.conftest import Service, settings_with
from tests.api.test_bodies import is_problem
from tests.fakes import Runner, failed


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nope"),
        ("GET", "/policy_version/"),
        ("GET", "/groups/nonsense"),
        ("GET", "/groups/g-1"),
        ("GET", "/groups/g-0"),
        ("GET", "/groups/g-99999999999999999999"),
        ("GET", "/groups/%00"),
        ("GET", "/groups/%ff%fe"),
        ("DELETE", "/groups/g-7"),
        ("POST", "/leases/%00/ack"),
        ("POST", "/leases/%F0%9F%99%82/ack"),
        ("POST", f"/leases/{'x' * 5000}/ack"),
        ("DELETE", "/checkpoints/none"),
    ],
)
async def test_what_is_not_there_is_a_404(service: Service, method: str, path: str):
    is_problem(await service.http.request(method, path), 404, "not-found")


async def test_a_wrong_method_is_a_405_that_names_the_right_ones(service: Service):
    answer = await service.http.request("PUT", "/groups/g-1")
    is_problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "DELETE, GET"
    is_problem(await service.http.post("/status"), 405, "method-not-allowed")


STATES = ", ".join(GroupState)


@pytest.mark.parametrize(
    ("query", "field", "what"),
    [
        ("limit=0", "limit", 'expected at least 1, got "0"'),
        ("limit=1001", "limit", 'expected at most 1000, got "1001"'),
        ("limit=7.0", "limit", 'expected an integer, got "7.0"'),
        ("limit=%207", "limit", 'expected an integer, got " 7"'),
        ("limit=true", "limit", 'expected an integer, got "true"'),
        ("limit=-1", "limit", 'expected at least 1, got "-1"'),
        ("limit=99999999999999999999", "limit", 'expected at most 1000, got "99999999999999999999"'),
        ("after=7", "after", 'expected a group id such as "g-42"'),
        ("after=", "after", 'expected a group id such as "g-42"'),
        ("state=nope", "state", f"'nope' is none of {STATES}"),
        ("state=ready,nope", "state", f"'nope' is none of {STATES}"),
        ("state=ready&state=nope", "state", f"'nope' is none of {STATES}"),
        ("sate=ready", "sate", "unknown key"),
    ],
)
async def test_query_parameters_are_exact(service: Service, query: str, field: str, what: str):
    document = is_problem(await service.http.get(f"/groups?{query}"), 422, "invalid-field")
    assert (document["field"], document["detail"]) == (field, f"{field}: {what}")


async def test_a_refused_query_is_told_in_short(service: Service):
    for query in ("k" * 20_000 + "=1", "limit=" + "k" * 20_000, "after=" + "9" * 20_000):
        answer = await service.http.get(f"/groups?{query}")
        assert answer.status_code == 422
        assert len(answer.content) < 1000


async def test_a_lower_version_is_a_409_and_changes_nothing(service: Service):
    await service.post("/policy_version", {"version": 5})
    is_problem(await service.post("/policy_version", {"version": 4}), 409, "conflict")
    assert (await service.http.get("/policy_version")).json() == {"version": 5, "max_staleness": 4}


async def test_a_full_queue_is_a_429_with_retry_after():
    settings = settings_with(
        groups={"num_generations": 4, "max_pending_groups": 2}, dispatch={"max_inflight_rollouts": 4}
    )
    async with Service(settings=settings).in_process() as service:
        await service.submit("a", "b")
        await service.submit("c")
        answer = await service.post("/prompts", {"prompts": [{"prompt": "d"}]})
        is_problem(answer, 429, "queue-full")
        assert int(answer.headers["retry-after"]) >= 1
        assert service.door.status().counts.submitted == 3


async def test_a_halt_is_a_503_with_the_engine_the_group_and_the_message():
    async with Service(runner=Runner(answer=lambda job: failed(job.index))).in_process() as service:
        (group_id,) = await service.submit("a")
        document = is_problem(await service.post("/leases", {"max_groups": 1, "wait_s": 30}), 503, "halted")
        assert document["group_id"] == group_id
        assert document["engine"] == "http://engine"
        assert document["error"] == "unlucky prompt 4711"
        ready = is_problem(await service.http.get("/readyz"), 503, "not-ready")
        assert "unlucky prompt 4711" in ready["detail"]
        assert (await service.http.get("/livez")).status_code == 200
        assert (await service.http.get("/status")).json()["halted"]["group_id"] == group_id
        answer = await service.http.post("/resume")
        assert answer.json() == {"paused": False, "halted": None}
        assert (await service.http.get("/readyz")).json() == {"status": "ready"}


async def test_a_store_that_cannot_commit_is_a_503_with_retry_after(service: Service):
    service.store.fail_commits = StoreUnavailable("disk full")
    answer = await service.post("/policy_version", {"version": 1})
    is_problem(answer, 503, "store-unavailable")
    assert answer.headers["retry-after"] == "1"
    assert "disk full" in is_problem(await service.http.get("/readyz"), 503, "not-ready")["detail"]


async def test_readyz_says_that_no_engine_is_healthy(service: Service):
    service.fleet.capacity = 0
    document = is_problem(await service.http.get("/readyz"), 503, "not-ready")
    assert document["reasons"] == ["no engine is healthy"]


async def test_a_paused_service_is_ready(service: Service):
    assert (await service.http.post("/pause")).json() == {"paused": True, "halted": None}
    assert (await service.http.get("/readyz")).status_code == 200


async def test_a_service_that_ends_says_so(service: Service):
    await service.door.stop()
    is_problem(await service.post("/policy_version", {"version": 1}), 503, "shutting-down")


async def test_a_fault_of_ours_is_a_500_without_its_insides_and_logged_with_them(service: Service, monkeypatch):
    def broken():
        raise RuntimeError("secret detail")

    monkeypatch.setattr(service.door, "status", broken)
    with capture_logs() as logs:
        answer = await service.http.get("/status")
    is_problem(answer, 500, "internal")
    assert "secret" not in answer.text
    (entry,) = [entry for entry in logs if entry["event"] == "request_failed"]
    assert entry["route"] == "/status"
    assert entry["exc_info"]


def test_facts_never_replace_the_members_of_the_standard_and_text_is_made_valid():
    answer = problem_of(QueueFull("full \ud800", retry_after_s=3, status=200, type="x", pending=4))
    document = json.loads(bytes(answer.body))
    assert document == {
        "type": "/problems/queue-full",
        "title": "Queue full",
        "status": 429,
        "detail": "full \\ud800",
        "pending": 4,
    }
    assert answer.headers["retry-after"] == "3"
    assert problem_of(BodyTooLarge("x")).headers["connection"] == "close"
