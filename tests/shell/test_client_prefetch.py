"""Leases asked for while the trainer computes. Every test runs on both drivers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import DRIVERS, Fault, ScriptedService, group, problem
from trainer_client import AsyncRolloutClient, Halted, RolloutClient, ServiceUnreachable, prefetch


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    service = ScriptedService(ready=[group(f"g{i}") for i in range(5)]).start()
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


def leased(service: ScriptedService, count: int) -> None:
    service.wait_for(lambda: len(service.leases) >= count and service.in_service <= 1)


def ids(lease: Any) -> list[str]:
    return [g.group_id for g in lease.groups]


def unanswered(service: ScriptedService, path: str, number: int = 1) -> threading.Event:
    """Request `number` for `path` is acted on and gets no answer; the event is set once it was acted on."""
    acted, answer = threading.Event(), service._answer

    async def silent(request: web.BaseRequest, body: Any) -> web.Response:
        answered = await answer(request, body)
        if request.path == path and len(service.requests(path)) >= number and not acted.is_set():
            acted.set()
            await asyncio.Event().wait()  # until its caller hangs up or the service ends
        return answered

    service._answer = silent  # type: ignore[method-assign]  # this one fault needs the moment between commit and answer
    return acted


class Told(logging.Handler):
    """Sets `event` when the client logs a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.event = text, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.event.set()


@pytest.fixture
def told() -> Iterator[Callable[[str], threading.Event]]:
    handlers: list[Told] = []

    def when(text: str) -> threading.Event:
        handlers.append(Told(text))
        logging.getLogger("trainer_client").addHandler(handlers[-1])
        return handlers[-1].event

    yield when
    for handler in handlers:
        logging.getLogger("trainer_client").removeHandler(handler)


def test_the_next_lease_is_taken_while_the_trainer_computes_and_no_more_than_that(service, connect):
    with connect().prefetch(max_groups=1) as leases:
        assert ids(next(leases)) == ["g0"]
        leased(service, 2)
        assert len(service.leases) == 2
        assert service.acked == []
        assert ids(next(leases)) == ["g1"]
        assert service.acked == ["g0"]
        leased(service, 3)


def test_every_group_is_trained_once_and_acked_and_exhausted_ends_the_loop(service, connect):
    trained = []
    with connect().prefetch(max_groups=2, depth=2) as leases:
        for lease in leases:
            trained += ids(lease)
        assert next(leases, None) is None
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert service.released == []


def test_a_last_lease_smaller_than_min_groups_comes_once_the_one_in_hand_is_acked(service, connect):
    with connect().prefetch(max_groups=3, min_groups=3) as leases:
        assert [ids(lease) for lease in leases] == [["g0", "g1", "g2"], ["g3", "g4"]]


def test_leaving_the_block_acks_the_lease_in_hand_and_gives_back_what_waits(service, connect):
    with connect().prefetch(max_groups=2) as leases:
        next(leases)
        leased(service, 2)
    assert (service.acked, service.released) == (["g0", "g1"], ["g2", "g3"])
    assert not any(held.open for held in service.leases.values())


def test_an_exception_gives_back_the_lease_in_hand_too(service, connect):
    def train() -> None:
        with connect().prefetch(max_groups=2) as leases:
            for _ in leases:
                leased(service, 2)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert service.acked == []
    assert sorted(service.released) == ["g0", "g1", "g2", "g3"]


def test_a_lease_made_for_a_call_that_is_cut_off_by_leaving_is_given_back(service, connect):
    acted = unanswered(service, "/leases", 2)
    with connect().prefetch(max_groups=2) as leases:
        next(leases)
        assert acted.wait(10)
    assert service.acked == ["g0", "g1"]
    assert service.released == ["g2", "g3"]


def test_leaving_does_not_wait_for_a_long_poll(service, connect):
    service.ready, service.exhausted_when_empty = [group("g0")], False
    client = connect()
    with client.prefetch(max_groups=1, wait_s=60) as leases:
        next(leases)
        service.wait_for(lambda: service.in_service == 1)
        left = time.monotonic()
    assert time.monotonic() - left < 20
    service.wait_for(lambda: service.in_service == 0)


def test_what_became_too_old_while_it_waited_is_released_and_never_handed_over(service, connect):
    service.ready = [group("g0", 3), group("g1", 2), group("g2", 3), group("g3", 4)]
    service.version, service.max_staleness = 3, 1
    client = connect()
    with client.prefetch(max_groups=2) as leases:
        assert ids(next(leases)) == ["g0", "g1"]
        leased(service, 2)
        client.post_version(5)
        lease = next(leases)
        assert ids(lease) == ["g3"]
        assert (lease.policy_version, lease.groups[0].staleness) == (5, 1)
    assert service.released == ["g2"]
    assert service.acked == ["g0", "g1", "g3"]


def test_a_lease_of_which_nothing_is_good_any_more_is_passed_over(service, connect):
    service.ready = [group("g0", 0), group("g1", 0), group("g2", 9)]
    client = connect()
    with client.prefetch(max_groups=1) as leases:
        next(leases)
        leased(service, 2)
        client.post_version(9)
        assert ids(next(leases)) == ["g2"]
    assert service.released == ["g1"]


def test_where_another_posts_the_versions_the_service_is_asked_for_the_current_one(service, connect):
    service.ready = [group("g0", 0), group("g1", 0), group("g2", 9)]
    with connect().prefetch(max_groups=1) as leases:
        next(leases)
        leased(service, 2)
        service.version = 9
        assert ids(next(leases)) == ["g2"]
    assert service.released == ["g1"]


def test_after_a_reset_no_lease_from_before_is_handed_over(service, connect):
    service.version, service.max_staleness = 4, 9
    client = connect()
    with client.prefetch(max_groups=1) as leases:
        next(leases)
        leased(service, 2)
        client.post_version(0, reset=True)
        assert ids(next(leases)) == ["g2"]


def test_leases_are_renewed_before_they_run_out_in_hand_and_waiting(service, connect):
    with connect().prefetch(max_groups=2, lease_s=4) as leases:
        next(leases)
        leased(service, 2)
        service.wait_for(lambda: all(held.renewals >= 2 for held in service.leases.values()), within=30)


def test_a_lease_that_ran_out_while_it_waited_is_passed_over(service, connect, caplog):
    client = connect()
    with client.prefetch(max_groups=2, lease_s=1) as leases:
        next(leases)
        leased(service, 2)
        list(service.leases.values())[1].open.clear()
        service.wait_for(lambda: bool(service.requests("/leases/l1/renew")) and service.in_service == 0)
        client.status()  # the answer to the renewal has been read by now
        assert ids(next(leases)) == ["g4"]
    assert "is lost" in caplog.text


def test_a_halt_raises_in_the_loop_after_what_was_leased_before(service, connect):
    service.halted = {"error": "out of memory"}
    found = []

    def train() -> None:
        with connect().prefetch(max_groups=3) as leases:
            for lease in leases:
                found.append(ids(lease))

    with pytest.raises(Halted, match="out of memory"):
        train()
    assert found == [["g0", "g1", "g2"], ["g3", "g4"]]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert service.seen[-1].body["wait_s"] == 30  # and no lease is looked for that a halt did not make


def test_a_service_that_stays_away_raises_in_the_loop(service, connect):
    def train() -> None:
        with connect(retry_for_s=0.2).prefetch(max_groups=5) as leases:
            next(leases)
            service.stop()
            next(leases)

    with pytest.raises(ServiceUnreachable):
        train()


def test_no_group_is_lost_or_repeated_through_cut_answers_and_a_restart(service, connect):
    service.faults = [
        Fault("/leases", cut="after"),
        Fault("/leases/l0/ack", cut="after"),
        Fault("/leases/l1/ack", answer=lambda: problem(503, "store-unavailable", "disk full")),
    ]
    trained = []
    with connect().prefetch(max_groups=2) as leases:
        for lease in leases:
            trained += ids(lease)
            if len(trained) == 2:
                service.stop()
                service.start()
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_it_is_used_as_a_context_manager(service):
    with RolloutClient(service.url) as client, pytest.raises(RuntimeError, match="context manager"):
        next(client.prefetch())


def test_a_depth_of_none_and_a_transport_of_ones_own_are_refused(service):
    import httpx

    with RolloutClient(service.url) as client, pytest.raises(ValueError, match="depth"):
        client.prefetch(depth=0)
    with (
        RolloutClient(service.url, transport=httpx.HTTPTransport()) as client,
        pytest.raises(ValueError, match="transport"),
    ):
        client.prefetch()


def test_a_service_that_is_not_there_raises_on_entering(service):
    service.stop()
    with RolloutClient(service.url, retry_for_s=0.0) as client, pytest.raises(ServiceUnreachable):  # noqa: SIM117  (reads in order)
        with client.prefetch():
            pytest.fail("entered")
    assert not [t for t in threading.enumerate() if t.name == "trainer-client-prefetch"]


# nights


def test_a_restart_while_a_lease_is_on_its_way_loses_and_repeats_nothing(service, connect):
    acted = unanswered(service, "/leases", 2)
    trained = []
    with connect().prefetch(max_groups=2) as leases:
        for lease in leases:
            trained += ids(lease)
            if len(trained) == 2:
                assert acted.wait(10)
                service.stop()
                service.start()
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]
    asked = [request.body["request_id"] for request in service.seen if request.path == "/leases"]
    assert len(asked) > len(set(asked)) == 4
    assert service.released == []


def test_a_service_away_for_longer_than_the_retries_costs_a_trainer_that_computes_nothing(
    service, connect, told, monkeypatch
):
    monkeypatch.setattr(prefetch, "AGAIN_S", 0.05)
    service.ready, service.exhausted_when_empty = [group("g0")], False
    gave_up = told("asking on")
    with connect(retry_for_s=0.05).prefetch(max_groups=1) as leases:
        assert ids(next(leases)) == ["g0"]
        service.wait_for(lambda: service.in_service == 1)
        service.stop()
        assert gave_up.wait(10)
        service.ready, service.exhausted_when_empty = [group("g1")], True
        service.start()
        leased(service, 2)
        assert [ids(lease) for lease in leases] == [["g1"]]
    assert service.acked == ["g0", "g1"]


def test_a_halt_that_was_cleared_while_the_trainer_computed_is_not_raised(service, connect, told):
    service.ready, service.halted = [group("g0")], {"error": "out of memory"}
    halted = told("out of memory")
    with connect().prefetch(max_groups=1) as leases:
        assert ids(next(leases)) == ["g0"]
        assert halted.wait(10)
        service.change(halted=None, ready=[group("g1")])
        assert [ids(lease) for lease in leases] == [["g1"]]


def test_a_halt_while_a_lease_waits_is_raised_with_its_reason_after_that_lease(service, connect):
    service.ready = [group("g0"), group("g1")]
    found: list[str] = []

    def train() -> None:
        with connect().prefetch(max_groups=1) as leases:
            for lease in leases:
                found.extend(ids(lease))
                leased(service, 2)
                service.halted = {"error": "out of memory", "group_id": "g-7", "engine": "http://e:8000"}

    with pytest.raises(Halted, match="out of memory") as caught:
        train()
    assert (caught.value.group_id, caught.value.engine) == ("g-7", "http://e:8000")
    assert found == service.acked == ["g0", "g1"]


def test_a_lease_that_ended_before_its_lost_answer_could_be_fetched_is_asked_for_anew(service, connect, caplog):
    def ended() -> web.Response:
        held = list(service.leases.values())[-1]
        held.open.clear()
        service.ready[:0] = held.groups
        return problem(409, "conflict", "its lease has ended")

    service.faults = [Fault("/leases", cut="after"), Fault("/leases", answer=ended)]
    with connect().prefetch(max_groups=2) as leases:
        trained = [group_id for lease in leases for group_id in ids(lease)]
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert "its lease has ended" in caplog.text


def test_a_group_that_comes_again_because_its_lease_ran_out_unnoticed_is_handed_over_once(service, connect):
    service.ready = [group("g0"), group("g1")]
    trained = []
    with connect().prefetch(max_groups=1, depth=3) as leases:
        trained += ids(next(leases))
        leased(service, 2)
        service.wait_for(lambda: service.in_service == 1)
        service.leases[list(service.leases)[1]].open.clear()
        service.change(ready=[group("g1")])
        leased(service, 3)
        service.wait_for(lambda: service.in_service == 1)  # it asks for one more: the last answer was read
        for lease in leases:
            trained += ids(lease)
    assert trained == service.acked == ["g0", "g1"]


def test_a_renewal_that_failed_is_made_up_for_before_the_lease_runs_out(service, connect, monkeypatch):
    monkeypatch.setattr(prefetch, "AGAIN_S", 0.05)
    service.faults = [Fault("/leases/l0/renew", answer=lambda: problem(503, "store-unavailable", "disk full"))]
    with connect(retry_for_s=0.0).prefetch(max_groups=5, lease_s=2) as leases:
        next(leases)
        service.wait_for(lambda: next(iter(service.leases.values())).renewals == 1)
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_groups_below_the_version_posted_here_are_good_once_somebody_else_went_back(service, connect):
    service.ready = [group("g0", 5), group("g1", 5)]
    client = connect()
    client.post_version(9)
    service.version = 5
    with client.prefetch(max_groups=1) as leases:
        assert [(ids(lease), lease.policy_version) for lease in leases] == [(["g0"], 5), (["g1"], 5)]
    assert service.released == []


def test_a_lease_made_before_somebody_else_went_back_is_not_handed_over(service, connect):
    service.version, service.max_staleness = 4, 9
    with connect().prefetch(max_groups=1) as leases:
        next(leases)
        leased(service, 2)
        service.version = 1
        service.ready = [group("g9")]
        assert ids(next(leases)) == ["g9"]


def interrupt_when(acted: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        assert acted.wait(10)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=strike).start()


def settled_once(service: ScriptedService) -> None:
    """The lease in hand was acked, the one that waited given back, nothing is left open."""
    assert (service.acked, service.released) == (["g0", "g1"], ["g2", "g3"])
    assert not any(held.open for held in service.leases.values())
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-client-prefetch"]


def test_an_interrupt_during_the_ack_sends_it_again_and_gives_back_what_waits(service):
    acted = unanswered(service, "/leases/l0/ack")
    interrupt_when(acted)

    def train() -> None:
        with RolloutClient(service.url).prefetch(max_groups=2) as leases:
            next(leases)
            leased(service, 2)
            next(leases)

    with pytest.raises(KeyboardInterrupt):
        train()
    settled_once(service)


async def test_a_cancellation_during_the_ack_sends_it_again_and_gives_back_what_waits(service):
    async def train(client: AsyncRolloutClient) -> None:
        async with client.prefetch(max_groups=2) as leases:
            await anext(leases)
            await asyncio.to_thread(leased, service, 2)
            await anext(leases)

    acted = unanswered(service, "/leases/l0/ack")
    async with AsyncRolloutClient(service.url) as client:
        training = asyncio.create_task(train(client))
        assert await asyncio.to_thread(acted.wait, 10)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    settled_once(service)


def test_a_lease_that_an_interrupt_kept_from_the_trainer_is_not_acked(service):
    """As if Ctrl-C came in the moment between the answer and the assignment."""
    with RolloutClient(service.url).prefetch(max_groups=2) as leases:
        inner = leases._inner
        assert inner is not None
        assert ids(leases._wait(inner._next())) == ["g0", "g1"]
        leased(service, 2)
    assert (service.acked, sorted(service.released)) == ([], ["g0", "g1", "g2", "g3"])


def test_leaving_the_block_ends_another_threads_wait_for_a_lease(service):
    service.ready, service.exhausted_when_empty = [], False
    found: list[Any] = []
    with RolloutClient(service.url).prefetch() as leases:
        waiter = threading.Thread(target=lambda: found.append(next(leases, "the end")))
        waiter.start()
        service.wait_for(lambda: service.in_service == 1)
        inner = leases._inner
        assert inner is not None
        leases._wait(asyncio.wait_for(inner._wanted.wait(), 10))
    waiter.join(10)
    assert found == ["the end"]
