"""The client's calls over real sockets: answers, errors, retries. Every test runs on both drivers."""

from __future__ import annotations

import math
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.client_script import DRIVERS, Fault, ScriptedService, group, problem
from trainer_client import (
    ClientError,
    Conflict,
    EnginesBehind,
    Forbidden,
    Halted,
    InvalidRequest,
    LeaseStatus,
    NotFound,
    Problem,
    QueueFull,
    RolloutClient,
    ServiceUnreachable,
    ShuttingDown,
    StoreUnavailable,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
)
from trainer_client.core import Core, Pause, Response


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    service = ScriptedService().start()
    yield service
    service.stop()


@pytest.fixture(params=DRIVERS, ids=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, service: ScriptedService) -> Iterator[Callable[..., Any]]:
    clients: list[Any] = []

    def make(**options: Any) -> Any:
        clients.append(request.param(service.url, **{"retry_for_s": 20.0, "timeout_s": 10.0, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def answering(status: int, slug: str, detail: str = "no", **facts: Any) -> Callable[[], web.Response]:
    return lambda: problem(status, slug, detail, **facts)


# answers


def test_a_lease_carries_typed_groups_and_members_of_a_later_release_are_ignored(service, connect):
    service.ready = [group("g1"), group("g2")]
    lease = connect(consumer="rank0").lease(max_groups=8, wait_s=0)
    assert lease.status is LeaseStatus.OK
    assert [g.group_id for g in lease.groups] == ["g1", "g2"]
    assert lease.groups[0].samples[1].input_ids == [100, 101, 102, 103, 104]
    assert lease.groups[0].columns == {"answer": 42}
    assert len(lease.samples) == 4
    assert service.seen[0].body["consumer"] == "rank0"
    assert service.seen[0].body["max_groups"] == 8
    assert service.seen[0].body["request_id"]


def test_an_empty_lease_needs_no_ack_and_none_is_sent(service, connect):
    service.exhausted_when_empty = False
    client = connect()
    lease = client.lease(wait_s=0)
    assert lease.status is LeaseStatus.EMPTY
    client.ack(lease)
    client.release(lease)
    assert [request.path for request in service.seen] == ["/leases"]


def test_posting_a_version_says_what_it_did_and_the_bound_can_be_read(service, connect):
    client = connect()
    result = client.post_version(3)
    assert (result.version, result.previous, result.stale_groups, result.aborted_rollouts) == (3, 0, 2, 9)
    assert client.post_version(3).aborted_rollouts == 0
    assert (client.version().version, client.version().max_staleness) == (3, 1)


def test_weights_and_adapters_go_with_the_version_they_make(service, connect):
    client = connect()
    client.post_version(1, weights="/ckpt/1")
    client.post_version(2, lora=("policy-v2", "/adapters/2"))
    assert [request.body for request in service.requests("/policy_version")] == [
        {"version": 1, "reset": False, "weights": {"path": "/ckpt/1"}},
        {"version": 2, "reset": False, "lora": {"name": "policy-v2", "path": "/adapters/2"}},
    ]


def test_engines_that_did_not_follow_are_named_once_and_the_call_is_not_repeated_by_itself(service, connect):
    left = [{"id": "e1", "url": "http://b", "error": "no space left"}]
    service.faults = [Fault("/policy_version", answer=answering(502, "engines-behind", "e1 is behind", engines=left))]
    client = connect()
    with pytest.raises(EnginesBehind, match="e1 is behind") as caught:
        client.post_version(1, weights="/ckpt/1")
    assert caught.value.engines == left
    assert len(service.requests("/policy_version")) == 1
    assert client.post_version(1, weights="/ckpt/1").version == 1


def test_a_lower_version_is_a_conflict_unless_it_is_a_reset(service, connect):
    client = connect()
    client.post_version(3)
    with pytest.raises(Conflict, match="lower") as caught:
        client.post_version(2)
    assert caught.value.status == 409
    assert caught.value.facts == {"version": 3}
    assert client.post_version(2, reset=True).version == 2


def test_parts_of_a_lease_can_be_acked_and_released(service, connect):
    service.ready = [group("g1"), group("g2"), group("g3")]
    client = connect()
    lease = client.lease(wait_s=0)
    client.ack(lease, ["g2"])
    client.release(lease.lease_id, ["g3"])
    client.ack(lease, [])
    assert (service.acked, service.released) == (["g2"], ["g3"])
    assert client.renew(lease).expires_at == "later"


def test_status_groups_engines_and_metrics_can_be_looked_at(service, connect):
    service.ready = [group(f"g{i}") for i in range(5)]
    client = connect()
    status = client.status()
    assert (status.outstanding, status.slots.free, status.groups["ready"], status.halted) == (5, 5, 5, None)
    assert client.group("g1").state == "ready"
    assert client.group("g1").facts["attempts"] == []
    assert client.engines() == [{"id": "e0", "healthy": True}]
    assert "rollout_policy_version" in client.metrics()
    with pytest.raises(NotFound, match="no group x/y"):
        client.group("x/y")


def test_groups_are_paged_until_the_last_one(service, connect):
    service.ready = [group(f"g{i}") for i in range(5)]
    client, found, after = connect(), [], None
    while True:
        page = client.groups(state="ready", limit=2, after=after)
        found += [g.group_id for g in page.groups]
        if (after := page.next_after) is None:
            break
    assert found == ["g0", "g1", "g2", "g3", "g4"]
    assert "state=ready" in service.seen[0].path


def test_dispatch_can_be_paused_and_groups_cancelled(service, connect):
    service.ready = [group("g1")]
    client = connect()
    client.pause()
    assert client.status().paused
    client.resume()
    assert not client.status().paused
    client.cancel("g1")
    assert service.ready == []
    with pytest.raises(Conflict, match="has ended"):
        client.cancel("g1")


def test_checkpoints_are_made_listed_returned_to_and_forgotten(service, connect):
    client = connect()
    client.create_checkpoint("step-1")
    with pytest.raises(Conflict):
        client.create_checkpoint("step-1")
    assert client.checkpoints() == [{"name": "step-1"}]
    assert client.rewind("step-1") == {"version": 3}
    client.delete_checkpoint("step-1")
    with pytest.raises(NotFound):
        client.delete_checkpoint("step-1")


def test_a_prompt_without_an_id_gets_one_and_array_values_go_as_plain_ones(service, connect):
    rows = [{"prompt_token_ids": np.array([1, 2]), "columns": {"n": np.int64(3)}}, {"prompt": "x", "prompt_id": "mine"}]
    groups = connect().submit(rows, final=True)
    body = service.seen[0].body
    assert [g.prompt_id for g in groups] == [row["prompt_id"] for row in body["prompts"]]
    assert groups[1].prompt_id == "mine"
    assert len(groups[0].prompt_id) == 36
    assert body["prompts"][0]["prompt_token_ids"] == [1, 2]
    assert body["prompts"][0]["columns"] == {"n": 3}
    assert body["final"] is True
    assert "prompt_id" not in rows[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, object()])
def test_what_is_not_json_is_refused_before_anything_is_sent(service, connect, value):
    with pytest.raises((ValueError, TypeError)):
        connect().submit([{"prompt": "x", "columns": {"a": value}}])
    assert service.seen == []


# errors


@pytest.mark.parametrize(
    ("status", "slug", "kind"),
    [
        (400, "bad-request", InvalidRequest),
        (413, "body-too-large", InvalidRequest),
        (422, "invalid-field", InvalidRequest),
        (401, "unauthorized", Unauthorized),
        (403, "forbidden", Forbidden),
        (403, "engine-not-allowed", Forbidden),
        (404, "not-found", NotFound),
        (409, "conflict", Conflict),
        (500, "internal", Problem),
    ],
)
def test_a_refusal_is_raised_at_once_with_its_detail(service, connect, status, slug, kind):
    service.faults = [Fault("/status", answer=answering(status, slug, "look here", field="version"))]
    with pytest.raises(kind, match="look here") as caught:
        connect().status()
    assert type(caught.value) is kind
    assert (caught.value.type, caught.value.status, caught.value.facts) == (slug, status, {"field": "version"})
    assert len(service.seen) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_a_halt_raises_at_once_with_the_engines_message(service, connect, nested):
    facts = {"error": "CUDA error: out of memory", "group_id": "g-7", "engine": "http://e:8000"}
    service.halted = {"halted": facts} if nested else facts
    with pytest.raises(Halted, match="out of memory") as caught:
        connect().lease(wait_s=30)
    error = caught.value
    assert (error.group_id, error.engine, error.error) == ("g-7", "http://e:8000", "CUDA error: out of memory")
    assert "halted after 1 failed group" in str(error)
    assert "http://e:8000" in str(error)
    assert len(service.seen) == 1


def test_a_lease_call_that_waits_raises_when_the_service_halts(service, connect):
    service.exhausted_when_empty = False
    client, caught = connect(), []

    def wait() -> None:
        with pytest.raises(Halted) as info:
            client.lease(wait_s=60)
        caught.append(str(info.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    service.wait_for(lambda: service.in_service == 1)
    service.change(halted={"error": "engine died"})
    waiter.join(10)
    assert "engine died" in caught[0]


def test_another_server_on_the_address_is_told_from_a_missing_group(service, connect):
    service.faults = [Fault("/policy_version", answer=lambda: web.Response(text="<html>hello</html>"))]
    with pytest.raises(UnexpectedAnswer, match="<html>hello"):
        connect().version()
    service.faults = [Fault("/status", answer=lambda: web.json_response({"policy_version": "7"}))]
    with pytest.raises(UnexpectedAnswer, match="policy_version"):
        connect().status()


def test_an_error_page_that_is_no_problem_document_keeps_its_text(service, connect):
    service.faults = [Fault("/status", answer=lambda: web.Response(status=404, text="nothing of that name"))]
    with pytest.raises(NotFound, match="nothing of that name") as caught:
        connect().status()
    assert caught.value.type == "about:blank"


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="http://host:port"):
        RolloutClient(url)


def test_errors_survive_pickling():
    for error in (Halted("h", type="halted", status=503, facts={"engine": "e"}), ServiceUnreachable("u", sent=False)):
        again = pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
        assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


# retries


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_lease_whose_answer_was_lost_is_fetched_again_under_the_same_request_id(service, connect, cut):
    service.ready = [group("g1"), group("g2")]
    service.faults = [Fault("/leases", cut=cut), Fault("/leases", cut=cut)]
    lease = connect().lease(max_groups=1, wait_s=0)
    assert [g.group_id for g in lease.groups] == ["g1"]
    assert len(service.seen) == 3
    assert len({request.body["request_id"] for request in service.seen}) == 1
    assert [g["group_id"] for g in service.ready] == ["g2"]


def test_two_leases_never_share_a_request_id_and_a_given_one_is_kept(service, connect):
    service.exhausted_when_empty = False
    client = connect()
    client.lease(wait_s=0)
    client.lease(wait_s=0)
    client.lease(wait_s=0, request_id="step-12")
    first, second, third = (request.body["request_id"] for request in service.seen)
    assert first != second
    assert third == "step-12"


def test_a_submission_whose_answer_was_lost_is_not_made_twice(service, connect):
    service.faults = [Fault("/prompts", cut="after")]
    groups = connect().submit([{"prompt": "x"}, {"prompt": "y"}])
    assert len(service.prompts) == 2
    assert {g.group_id for g in groups} == {row["group_id"] for row in service.prompts.values()}


def test_an_ack_whose_answer_was_lost_is_repeated(service, connect):
    service.ready = [group("g1")]
    service.faults = [Fault("/leases/", cut="after")]
    client = connect()
    client.ack(client.lease(wait_s=0))
    assert service.acked == ["g1"]
    assert len(service.requests("/leases/")) == 2


def test_a_release_whose_answer_was_lost_counts_as_done(service, connect):
    service.ready = [group("g1")]
    service.faults = [Fault("/leases/", cut="after")]
    client = connect()
    lease = client.lease(wait_s=0)
    client.release(lease)
    assert service.released == ["g1"]
    with pytest.raises(Conflict):
        client.release(lease)


def test_a_cancel_or_a_checkpoint_whose_answer_was_lost_counts_as_done(service, connect):
    service.ready = [group("g1")]
    service.faults = [Fault("/groups/g1", cut="after"), Fault("/checkpoints", cut="after")]
    client = connect()
    client.cancel("g1")
    assert client.create_checkpoint("a") == {"name": "a"}
    service.faults = [Fault("/checkpoints/a", cut="after")]
    client.delete_checkpoint("a")
    assert (service.ready, service.marks) == ([], [])


def test_a_rewind_is_repeated_only_when_the_first_was_certainly_not_done(service, connect):
    service.marks = ["a"]
    service.faults = [Fault("/rewind", answer=answering(503, "store-unavailable"))]
    client = connect()
    assert client.rewind("a") == {"version": 3}
    service.faults = [Fault("/rewind", cut="after")]
    with pytest.raises(ServiceUnreachable):
        client.rewind("a")
    service.faults = [Fault("/rewind", answer=answering(504, "about:blank"))]
    with pytest.raises(Unavailable):
        client.rewind("a")
    assert len(service.requests("/rewind")) == 4


@pytest.mark.parametrize(
    "fault",
    [
        answering(503, "store-unavailable"),
        answering(503, "shutting-down"),
        lambda: web.Response(status=502, text="bad gateway"),
        lambda: web.Response(status=503, text="no upstream"),
        lambda: web.Response(status=504, text="upstream timed out"),
    ],
)
def test_what_passes_is_tried_again(service, connect, fault):
    service.faults = [Fault("/policy_version", answer=fault)] * 2
    assert connect().post_version(4).version == 4
    assert len(service.seen) == 3


@pytest.mark.parametrize(
    ("slug", "kind"), [("store-unavailable", StoreUnavailable), ("shutting-down", ShuttingDown), ("other", Unavailable)]
)
def test_what_does_not_pass_is_raised_when_the_time_is_up(service, connect, slug, kind):
    service.faults = [Fault("/policy_version", answer=answering(503, slug, "disk full"))] * 100
    with pytest.raises(kind, match="disk full") as caught:
        connect(retry_for_s=0.3).post_version(4)
    assert type(caught.value) is kind
    assert 2 <= len(service.seen) < 10
    assert caught.value.__notes__ == [f"gave up after {len(service.seen)} tries"]


def test_with_no_time_to_retry_the_first_failure_is_raised(service, connect):
    service.faults = [Fault("/status", cut="before")]
    with pytest.raises(ServiceUnreachable, match=r"GET http://127.0.0.1:\d+/status: ") as caught:
        connect(retry_for_s=0).status()
    assert caught.value.sent
    assert len(service.seen) == 1


def perform(call: str, *args: Any, answers: list[Response | None]) -> tuple[Any, list[float]]:
    """What a call of the core returns or raises, and how long it paused before each repetition; None = cut off.

    Time moves by the pauses alone, so the timing is exact."""
    now, pauses = [100.0], []
    core = Core(timeout_s=1.0, retry_for_s=20.0, consumer=None, clock=lambda: now[0])
    flow = getattr(core, call)(*args)
    script = iter(answers)
    try:
        todo = next(flow)
        while True:
            if isinstance(todo, Pause):
                pauses.append(todo.seconds)
                now[0] += todo.seconds
                todo = flow.send(None)
            elif (answer := next(script)) is None:
                todo = flow.throw(ServiceUnreachable("cut off"))
            else:
                todo = flow.send(answer)
    except StopIteration as end:
        return end.value, pauses
    except ClientError as error:
        return error, pauses


FULL = Response(status=429, content=b'{"type": "queue-full", "detail": "10000 groups"}', retry_after="7")
TAKEN = Response(status=202, content=b'{"groups": [{"group_id": "g", "prompt_id": "p"}]}')


def test_a_full_queue_is_waited_for_as_long_as_the_service_asks():
    groups, pauses = perform("submit", [{"prompt": "x"}], answers=[FULL, TAKEN])
    assert groups[0].group_id == "g"
    assert pauses == [7.0]


def test_a_queue_that_stays_full_is_raised_when_the_time_is_up():
    error, pauses = perform("submit", [{"prompt": "x"}], answers=[FULL] * 9)
    assert isinstance(error, QueueFull)
    assert (str(error), error.retry_after_s) == ("10000 groups", 7.0)
    assert pauses == [7.0, 7.0, 6.0]


def test_a_full_queue_that_names_a_date_is_waited_for_as_any_failure():
    dated = Response(status=429, content=b"{}", retry_after="Wed, 21 Oct 2026 07:28:00 GMT")
    _, pauses = perform("submit", [{"prompt": "x"}], answers=[dated, TAKEN])
    assert len(pauses) == 1
    assert 0.05 <= pauses[0] <= 0.1


def test_backoff_doubles_from_a_tenth_to_two_seconds_and_the_budget_starts_at_the_first_failure():
    answers: list[Response | None] = [None] * 100
    error, pauses = perform("pause", answers=answers)
    bounds = [0.1, 0.2, 0.4, 0.8, 1.6] + [2.0] * (len(pauses) - 6)
    assert isinstance(error, ServiceUnreachable)
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=False))
    assert sum(pauses) == pytest.approx(20.0)


def test_a_full_queue_that_empties_takes_the_prompts_over_a_real_socket(service, connect):
    service.faults = [Fault("/prompts", answer=answering(429, "queue-full", retry_after=0))] * 2
    assert len(connect().submit([{"prompt": "x"}])) == 1
    assert len(service.seen) == 3


def test_a_service_that_accepts_and_never_answers_is_given_up(connect, request):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        make = request.node.callspec.params["connect"]
        with (
            make(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2, retry_for_s=0.0) as client,
            pytest.raises(ServiceUnreachable, match="Timeout"),
        ):
            client.status()


def test_calls_survive_a_restart_of_the_service(service, connect):
    service.ready = [group("g1")]
    client = connect()
    lease = client.lease(wait_s=0)
    service.stop()
    done: list[Any] = []
    caller = threading.Thread(target=lambda: done.append((client.ack(lease), client.post_version(5))))
    caller.start()
    service.start()
    caller.join(20)
    assert done[0][1].version == 5
    assert service.acked == ["g1"]


def test_a_lease_call_that_waits_survives_a_restart_and_keeps_its_request_id(service, connect):
    service.exhausted_when_empty = False
    client, leases = connect(), []
    caller = threading.Thread(target=lambda: leases.append(client.lease(wait_s=30)))
    caller.start()
    service.wait_for(lambda: service.in_service == 1)
    service.stop()
    service.ready = [group("g1")]
    service.start()
    caller.join(20)
    assert [g.group_id for g in leases[0].groups] == ["g1"]
    assert len({request.body["request_id"] for request in service.requests("/leases")}) == 1
