"""The rollout worker against a scripted service: what it acks, gives back, posts, survives, and leaves behind."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import Fault, ScriptedService, group, problem, sample
from trainer_client import Conflict, Denied, Halted, NotFound, ServiceUnreachable
from trainer_client.trl import RemoteRolloutWorker, RolloutSample, UnfitSample, feeder
from trainer_client.trl.feeder import Feeder

Make = Callable[..., RemoteRolloutWorker]


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    groups = [group(f"g-{i}") for i in range(4)]
    service = ScriptedService(ready=groups, exhausted_when_empty=False, max_staleness=9).start()
    yield service
    service.stop()


@pytest.fixture
def make(service: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes workers, stopped at the end; `started` ones have had their first version."""
    monkeypatch.setattr(feeder, "AGAIN_S", 0.02)
    made: list[RemoteRolloutWorker] = []

    def make(*, started: bool = True, **options: Any) -> RemoteRolloutWorker:
        made.append(RemoteRolloutWorker(service.url, **{"retry_for_s": 10.0, **options}))
        if started:
            made[-1].update_model_version(1)
            made[-1].start()
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


def pull(worker: RemoteRolloutWorker, count: int) -> list[RolloutSample]:
    return [worker.rollout_buffer.get(timeout=10) for _ in range(count)]


def calls(service: ScriptedService) -> list[str]:
    """What was asked of the service but looking in and leasing: the last parts of the paths."""
    told = [request.path.split("/")[-1] for request in service.seen if request.method == "POST"]
    return [name for name in told if name != "leases"]


# delivery


def test_rows_come_in_order_with_trls_numbers(service, make):
    rows = pull(make(), 4)
    assert [row.group_id for row in rows] == [0, 0, 1, 1]
    assert rows[1].input_ids.tolist() == [100, 101, 102, 103, 104]
    assert rows[0].enqueued_at is not None


def test_groups_are_leased_only_when_trl_wants_rows(service, make):
    worker = make(groups_per_lease=2)
    pull(worker, 3)
    assert len(service.requests("/leases")) == 1
    pull(worker, 2)
    assert len(service.requests("/leases")) == 2
    assert {request.body["max_groups"] for request in service.requests("/leases")} == {2}
    assert {request.body["consumer"] for request in service.requests("/leases")} == {"trl"}


def test_a_lost_answer_is_asked_for_again_and_nothing_comes_twice(service, make):
    service.faults = [Fault("/leases", cut="after")]
    rows = pull(make(), 8)
    assert [row.group_id for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    ids = [request.body["request_id"] for request in service.requests("/leases")]
    assert ids[0] == ids[1]


def test_samples_without_trained_tokens_never_reach_trl_and_are_counted(service, make):
    nothing = sample(1, completion=0, completion_mask=[0, 0])
    service.ready = [group("g-0", samples=[nothing]), group("g-1", samples=[sample(0), nothing])]
    worker = make()
    assert [row.group_id for row in pull(worker, 1)] == [1]
    worker.update_model_version(2)
    assert sorted(service.acked) == ["g-0", "g-1"]
    told = [worker.metrics_queue.get_nowait() for _ in range(2)]
    assert [entry["rollout/skipped_samples_total"] for entry in told] == [0, 2]


def test_a_sample_unfit_for_training_gives_its_lease_back_and_is_told(service, make):
    service.ready = [group("g-0"), group("g-1", samples=[sample(0, old_log_probs=[0.0])])]
    worker = make()
    worker.rollout_buffer.wanted.set()
    service.wait_for(lambda: service.released == ["g-0", "g-1"])
    with pytest.raises(UnfitSample, match="group g-1, sample 0"):
        until_raised(worker)


# acks and versions


def test_a_group_is_acked_at_the_first_version_after_its_last_row_left(service, make):
    worker = make()
    pull(worker, 3)
    worker.update_model_version(2)
    assert service.acked == ["g-0"]
    pull(worker, 1)
    assert service.acked == ["g-0"]
    worker.update_model_version(3)
    assert service.acked == ["g-0", "g-1"]


def test_acks_come_before_the_version_they_belong_to(service, make):
    worker = make()
    pull(worker, 2)
    worker.update_model_version(2)
    assert calls(service) == ["policy_version", "ack", "policy_version"]


def test_rows_trl_fetched_ahead_are_acked_one_version_later(service, make):
    worker = make(samples_ahead=2)
    pull(worker, 4)
    worker.update_model_version(2)
    assert service.acked == ["g-0"]
    pull(worker, 2)
    worker.update_model_version(3)
    assert service.acked == ["g-0", "g-1"]
    worker.stop()
    assert sorted(service.released) == ["g-2", "g-3"]


def test_a_fresh_service_counts_as_trl_does(service, make):
    worker = make()
    assert service.version == 1
    assert pull(worker, 1)[0].model_version == 0
    assert worker.next_version() == 2


def test_a_service_that_is_ahead_counts_on_from_where_it_is(service, make):
    service.version = 7
    service.ready = [group("g-0", 7, [sample(policy_version=7)])]
    worker = make(started=False)
    assert worker.next_version() == 8
    worker.update_model_version(1)
    worker.start()
    assert service.version == 8
    assert pull(worker, 1)[0].model_version == 0
    worker.update_model_version(2)
    assert service.version == 9


def test_an_offset_that_was_given_is_kept(service, make):
    worker = make(version_offset=40)
    assert service.version == 41
    assert worker.next_version() == 42


def test_a_version_below_the_services_says_what_to_set(service, make):
    service.version = 7
    with pytest.raises(Conflict, match=r"higher policy version than 3.*rewind_to.*version_offset"):
        make(version_offset=2)


def test_a_rewind_comes_first_and_its_version_is_the_offset(service, make):
    service.marks = ["step-400"]
    worker = make(started=False, rewind_to="step-400")
    assert worker.next_version() == 4
    worker.update_model_version(1)
    assert calls(service) == ["rewind", "policy_version"]
    assert service.version == 4


def test_a_rewind_to_a_mark_that_is_not_there_is_an_error(service, make):
    with pytest.raises(NotFound):
        make(rewind_to="step-400")


def test_offset_and_rewind_exclude_each_other(make):
    with pytest.raises(ValueError, match="exclude each other"):
        make(started=False, version_offset=1, rewind_to="x")


@pytest.mark.parametrize("wrong", [{"groups_per_lease": 0}, {"lease_s": 1}])
def test_impossible_numbers_are_refused_when_it_is_made(make, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(started=False, **wrong)


# staleness


def test_a_new_version_gives_back_what_it_makes_stale_but_not_what_trl_has_begun(service, make):
    service.max_staleness = 1
    service.ready = [group("g-0", 1), group("g-1", 1), group("g-2", 2)]
    worker = make()
    pull(worker, 1)
    until(lambda: worker.rollout_buffer.qsize() == 5)
    worker.update_model_version(3)
    assert service.released == ["g-1"]
    assert [row.group_id for row in pull(worker, 3)] == [0, 2, 2]
    posted = calls(service).index("policy_version", 1)
    assert calls(service)[posted + 1] == "release"


def test_the_bound_may_be_given(service, make):
    worker = make(max_staleness=0)
    worker.rollout_buffer.wanted.set()
    service.wait_for(lambda: sorted(service.released) == ["g-0", "g-1", "g-2", "g-3"])
    assert worker.rollout_buffer.empty()


# lost leases


def test_a_lease_lost_before_its_ack_is_named_and_the_rest_is_acked(service, make, caplog):
    worker = make(groups_per_lease=2)
    pull(worker, 4)
    held = next(iter(service.leases.values()))
    held.open.discard("g-0")
    with caplog.at_level(logging.WARNING, "trainer_client"):
        worker.update_model_version(2)
    assert service.acked == ["g-1"]
    assert "trained, but not ours: g-0" in caplog.text
    assert service.version == 2
    worker.update_model_version(3)  # forgotten: not tried again


def test_a_lease_lost_while_it_waits_takes_its_rows_out_of_the_queue(service, make, caplog):
    now = [0.0]
    worker = make(lease_s=10, groups_per_lease=2, clock=lambda: now[0])
    pull(worker, 1)
    until(lambda: worker.rollout_buffer.qsize() == 3)
    next(iter(service.leases.values())).open.clear()
    with caplog.at_level(logging.WARNING, "trainer_client"):
        now[0] = 5.0
        service.wait_for(lambda: len(service.requests("/leases/l0/renew")) == 1)
        until(lambda: worker.rollout_buffer.empty())
    assert "lost, with the groups g-0, g-1" in caplog.text


def test_leases_are_renewed_at_half_of_their_time_while_they_wait_or_are_trained(service, make):
    now = [0.0]
    worker = make(lease_s=10, clock=lambda: now[0])
    pull(worker, 8)
    service.change(ready=[group("g-9")])
    now[0] = 4.9
    pull(worker, 1)  # the feeder has been round since
    assert service.requests("/leases/l0/renew") == []
    now[0] = 5.0
    service.wait_for(lambda: len(service.requests("/leases/l0/renew")) == 1)
    now[0] = 9.9
    service.wait_for(lambda: len(service.requests("/leases/l1/renew")) == 1)
    assert [held.renewals for held in service.leases.values()] == [1, 1]


def test_a_lease_that_is_acked_is_renewed_no_more(service, make):
    now = [0.0]
    worker = make(lease_s=10, groups_per_lease=2, clock=lambda: now[0])
    pull(worker, 5)
    worker.update_model_version(2)
    now[0] = 5.0
    service.wait_for(lambda: len(service.requests("/leases/l1/renew")) == 1)
    assert service.requests("/leases/l0/renew") == []


def test_a_renewal_that_fails_for_now_is_tried_again(service, make):
    now = [0.0]
    service.faults = [Fault("/leases/l0/renew", cut="before")]
    worker = make(lease_s=10, clock=lambda: now[0])
    pull(worker, 1)
    now[0] = 5.0

    def renewed() -> bool:
        now[0] += 0.1  # it is tried again after a while, not at once
        return next(iter(service.leases.values())).renewals == 1

    until(renewed)
    assert len(service.requests("/leases/l0/renew")) == 2


# metrics


def test_every_version_puts_what_was_added_to_the_services_counters_into_trls_queue(service, make):
    pages = [f'rollout_failed_total{{reason="x"}} {n}.0\nrollout_stale_groups_total 4.0\n' for n in (3, 5)]
    service.faults = [Fault("/metrics", answer=lambda page=page: web.Response(text=page)) for page in pages]
    worker = make()
    worker.update_model_version(2)
    told = [worker.metrics_queue.get_nowait() for _ in range(2)]
    assert [entry["rollout/failed_total"] for entry in told] == [0, 2]
    assert [entry["rollout/stale_groups_total"] for entry in told] == [0, 0]
    assert all(type(value) is float and not math.isnan(value) for entry in told for value in entry.values())


def test_metrics_that_cannot_be_read_do_not_end_training(service, make, caplog):
    service.faults = [Fault("/metrics", answer=lambda: problem(503, "store-unavailable", "disk full"))]
    with caplog.at_level(logging.WARNING, "trainer_client"):
        worker = make()
    assert "disk full" in caplog.text
    assert "rollout/buffered_samples" in worker.metrics_queue.get_nowait()


# marks


def test_a_mark_that_is_there_already_gives_way(service, make):
    worker = make()
    worker.mark("step-2")
    worker.mark("step-3")
    worker.mark("step-2")
    assert worker.marks() == ["step-3", "step-2"]
    worker.forget_mark("step-3")
    worker.forget_mark("step-3")
    assert service.marks == ["step-2"]


# the end


def test_stop_gives_back_everything_that_was_not_acked(service, make):
    worker = make(groups_per_lease=2)
    pull(worker, 2)
    worker.update_model_version(2)
    pull(worker, 3)
    service.wait_for(lambda: len(service.leases) == 2)
    until(lambda: worker.rollout_buffer.qsize() == 3)
    worker.stop()
    worker.stop()
    assert service.acked == ["g-0"]
    assert sorted(service.released) == ["g-1", "g-2", "g-3"]
    assert worker.rollout_buffer.empty()


def test_stop_before_start_ends_nothing_and_a_stopped_worker_starts_no_more(service, make):
    worker = make(started=False)
    worker.stop()
    with pytest.raises(RuntimeError, match="make a new one"):
        worker.start()
    assert service.seen == []


def test_start_needs_a_version(make):
    with pytest.raises(RuntimeError, match="comes before start"):
        make(started=False).start()


def test_stop_in_a_long_poll_leaves_no_thread_and_no_lease(service, make):
    service.ready = []
    worker = make()
    worker.rollout_buffer.wanted.set()
    service.wait_for(lambda: len(service.requests("/leases")) == 1)
    worker.stop()
    assert not any(thread.name == "trainer-client-trl" for thread in threading.enumerate())
    service.wait_for(lambda: service.in_service == 0)


def test_stop_while_the_feeder_waits_for_room_leaves_nothing_behind(service, make):
    worker = make(queue_maxsize=1)
    pull(worker, 1)
    until(lambda: worker.rollout_buffer.full())
    worker.stop()
    assert sorted(service.released) == ["g-0", "g-1", "g-2", "g-3"]


def test_stop_while_the_service_is_gone_ends_and_says_what_comes_back_by_itself(service, make, caplog):
    worker = make(groups_per_lease=2)
    pull(worker, 6)
    service.stop()
    with caplog.at_level(logging.WARNING, "trainer_client"):
        worker.stop()
    assert "come back by themselves" in caplog.text
    assert not any(thread.name == "trainer-client-trl" for thread in threading.enumerate())


def test_stop_gives_back_a_lease_whose_answer_was_lost(service, make, monkeypatch):
    service.faults = [Fault("/leases", cut="after")]
    worker = make()
    monkeypatch.setattr(feeder, "AGAIN_S", 30.0)  # it stands in this wait when it is stopped
    worker.rollout_buffer.wanted.set()
    until(lambda: worker._feeder is not None and worker._feeder.condition.trouble is not None)
    worker.stop()
    assert sorted(service.released) == ["g-0", "g-1", "g-2", "g-3"]


# troubles


def test_a_restart_of_the_service_is_survived(service, make):
    worker = make(groups_per_lease=2)
    pull(worker, 4)
    service.stop()
    service.start()
    worker.update_model_version(2)
    assert service.acked == ["g-0", "g-1"]
    assert [row.group_id for row in pull(worker, 4)] == [2, 2, 3, 3]


def test_the_time_a_service_may_be_gone_counts_from_the_first_call_that_failed(service, make):
    now = [0.0]
    worker = make(unreachable_after_s=120, groups_per_lease=1, lease_s=86400, clock=lambda: now[0])
    pull(worker, 2)
    now[0] = 1000.0  # a long step: nothing was asked of the service
    service.stop()
    worker.rollout_buffer.wanted.set()
    until(lambda: worker._feeder is not None and worker._feeder.condition.trouble is not None)
    now[0] = 1120.0
    worker.check_health(300)
    now[0] = 1121.0
    with pytest.raises(ServiceUnreachable, match="for 121 s"):
        worker.check_health(300)


def test_a_service_gone_for_too_long_when_a_version_is_posted_ends_training(service, make):
    worker = make(retry_for_s=0)
    service.stop()
    with pytest.raises(ServiceUnreachable, match="policy_version"):
        worker.update_model_version(2)


def test_a_halt_is_raised_and_a_resume_without_a_restart_goes_on(service, make):
    service.ready, service.halted = [], {"group_id": "g-8", "engine": "e0", "error": "CUDA out of memory"}
    worker = make()
    worker.rollout_buffer.wanted.set()
    with pytest.raises(Halted, match=r"CUDA out of memory.*g-8.*e0"):
        until_raised(worker)
    service.change(halted=None, ready=[group("g-9")])
    assert pull(worker, 1)[0].group_id == 9
    worker.check_health(300)


def test_a_refusal_ends_the_leasing_and_is_raised_as_it_is(service, make):
    service.faults = [Fault("/leases", answer=lambda: problem(401, "denied", "the key is wrong"))]
    worker = make()
    worker.rollout_buffer.wanted.set()
    with pytest.raises(Denied, match="the key is wrong"):
        until_raised(worker)


def test_a_fault_of_the_thread_itself_is_raised_with_its_cause(service, make, monkeypatch):
    monkeypatch.setattr(Feeder, "turn", lambda self: 1 / 0)
    worker = make()
    with pytest.raises(RuntimeError, match="thread ended: ZeroDivisionError") as raised:
        until_raised(worker)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_health_before_start_is_an_error(make):
    with pytest.raises(RuntimeError, match="was not started"):
        make(started=False).check_health(300)


def test_rows_that_wait_are_health_enough(service, make):
    worker = make()
    pull(worker, 1)
    until(lambda: not worker.rollout_buffer.empty())
    service.stop()
    worker.check_health(0)


def until(condition: Callable[[], bool]) -> None:
    """Look until `condition()`; what it waits for happens in the feeder's thread."""
    for _ in range(2000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("not within 10 s")


def until_raised(worker: RemoteRolloutWorker) -> None:
    """As TRL does on an empty queue: ask again and again; ends with what it raises."""

    def healthy() -> bool:
        worker.check_health(300)
        return False

    until(healthy)
