"""The loop over leases: what it acks, what it gives back, when it ends. Every test runs on both drivers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import DRIVERS, Fault, ScriptedService, group, problem
from trainer_client import AsyncRolloutClient, Halted, NotFound, RolloutClient, StoreUnavailable


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


def test_asking_for_the_next_lease_acks_the_one_before_and_exhausted_ends_the_loop(service, connect):
    client, acked_before = connect(), []
    for lease in client.leases(max_groups=2, wait_s=10):
        acked_before.append((list(service.acked), [g.group_id for g in lease.groups]))
    assert acked_before == [([], ["g0", "g1"]), (["g0", "g1"], ["g2", "g3"]), (["g0", "g1", "g2", "g3"], ["g4"])]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert service.released == []


def test_the_loop_asks_with_its_parameters(service, connect):
    for _ in connect(consumer="rank3").leases(max_groups=5, min_groups=4, wait_s=7, lease_s=99):
        pass
    body = service.seen[0].body
    assert {key: body[key] for key in body if key != "request_id"} == {
        "max_groups": 5, "min_groups": 4, "wait_s": 7, "lease_s": 99, "consumer": "rank3",
    }  # fmt: skip


def test_the_loop_goes_on_while_nothing_is_ready(service, connect):
    service.ready, service.exhausted_when_empty = [], False
    client, found = connect(), []

    def loop() -> None:
        found.extend(g.group_id for lease in client.leases(wait_s=0) for g in lease.groups)

    looper = threading.Thread(target=loop)
    looper.start()
    service.wait_for(lambda: len(service.requests("/leases")) > 3)
    service.change(ready=[group("g1")], exhausted_when_empty=True)
    looper.join(20)
    assert found == ["g1"]
    assert service.acked == ["g1"]


def test_an_exception_in_the_loop_gives_the_lease_in_hand_back(service, connect):
    client = connect()

    def train() -> None:
        for number, _ in enumerate(client.leases(max_groups=2)):
            if number == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    client.close()
    assert service.acked == ["g0", "g1"]
    assert service.released == ["g2", "g3"]


def test_leaving_the_loop_early_gives_the_lease_in_hand_back_unless_it_was_acked(service, connect):
    client = connect()
    with closing(client.leases(max_groups=2)) as leases:
        next(leases)
    assert (service.acked, service.released) == ([], ["g0", "g1"])
    with closing(client.leases(max_groups=2)) as leases:
        client.ack(next(leases))
    assert (service.acked, service.released) == (["g2", "g3"], ["g0", "g1"])


def test_closing_the_client_gives_back_what_a_loop_still_holds(service, connect):
    client = connect()
    leases = client.leases(max_groups=2)
    next(leases)
    client.close()
    assert service.released == ["g0", "g1"]


def test_a_lease_taken_by_hand_is_left_alone_when_the_client_closes(service, connect):
    client = connect()
    client.lease(max_groups=2)
    client.close()
    assert [request.path for request in service.seen] == ["/leases"]


def test_groups_settled_by_hand_are_not_settled_again(service, connect):
    client = connect()
    for lease in client.leases(max_groups=5):
        client.ack(lease, ["g0"])
        client.release(lease, ["g1", "g2"])
    assert service.acked == ["g0", "g3", "g4"]
    assert service.released == ["g1", "g2"]
    assert service.requests("/leases/")[-1].body == {"group_ids": ["g3", "g4"]}


def test_of_a_lost_lease_what_is_still_ours_is_acked_and_the_rest_is_named(service, connect, caplog):
    client = connect()
    with caplog.at_level(logging.WARNING, "trainer_client"):
        for lease in client.leases(max_groups=3):
            if "g1" in {g.group_id for g in lease.groups}:
                next(iter(service.leases.values())).open.discard("g1")  # somebody else has it
    assert service.acked == ["g0", "g2", "g3", "g4"]
    assert "trained, but not ours: g1 (" in caplog.text


def test_a_loop_goes_on_after_a_reset_voided_the_lease_in_hand(service, connect, caplog):
    client = connect()
    client.post_version(4)
    seen = []
    for lease in client.leases(max_groups=1):
        seen.append(lease.groups[0].group_id)
        if seen == ["g0"]:
            client.post_version(2, reset=True)
    assert seen == ["g0", "g1", "g2", "g3", "g4"]
    assert service.acked == ["g1", "g2", "g3", "g4"]
    assert "g0" in caplog.text


def test_a_lease_of_a_service_that_lost_its_store_is_an_error(service, connect):
    leases = connect().leases(max_groups=1)
    next(leases)
    service.leases.clear()
    with pytest.raises(NotFound, match="no lease l0"):
        next(leases)


def test_a_halt_raises_in_the_loop_after_the_ready_groups(service, connect):
    service.halted = {"error": "out of memory"}
    found: list[str] = []

    def train() -> None:
        for lease in connect().leases(max_groups=5):
            found.extend(g.group_id for g in lease.groups)

    with pytest.raises(Halted, match="out of memory"):
        train()
    assert found == service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_an_exception_is_not_hidden_by_a_service_that_is_gone(service, connect, caplog):
    client = connect(retry_for_s=0.2)

    def train() -> None:
        for _ in client.leases(max_groups=2):
            service.stop()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    client.close()
    assert "will run out by itself" in caplog.text


def test_no_group_is_lost_or_repeated_when_answers_are_cut_and_the_service_restarts(service, connect):
    service.faults = [
        Fault("/leases", cut="after"),
        Fault("/leases/l0/ack", cut="after"),
        Fault("/leases", cut="before"),
        Fault("/leases/l1/ack", answer=lambda: problem(503, "store-unavailable", "disk full")),
    ]
    trained: list[str] = []
    for lease in connect().leases(max_groups=2):
        trained += [g.group_id for g in lease.groups]
        if len(trained) == 2:
            service.stop()
            service.start()
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert service.faults == []


async def test_the_asyncio_client_gives_back_at_the_end_of_its_block(service):
    async with AsyncRolloutClient(service.url) as client:
        async for lease in client.leases(max_groups=2):
            assert lease.groups
            break
    assert service.released == ["g0", "g1"]


def test_a_lease_that_ended_before_its_lost_answer_could_be_fetched_is_asked_for_anew(service, connect, caplog):
    def ended() -> web.Response:
        held = next(iter(service.leases.values()))
        held.open.clear()
        service.ready[:0] = held.groups
        return problem(409, "conflict", "its lease has ended")

    service.faults = [Fault("/leases", cut="after"), Fault("/leases", answer=ended)]
    trained = [g.group_id for lease in connect().leases(max_groups=2) for g in lease.groups]
    assert trained == service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert "its lease has ended" in caplog.text


def test_a_trained_lease_whose_ack_failed_is_not_given_back_to_be_trained_again(service, connect):
    service.faults = [Fault("/leases/l0/ack", answer=lambda: problem(503, "store-unavailable", "disk full"))] * 100
    client = connect(retry_for_s=0.1)

    def train() -> None:
        for _ in client.leases(max_groups=2):
            pass

    with pytest.raises(StoreUnavailable):
        train()
    service.faults = []
    client.close()
    assert (service.acked, service.released) == ([], [])


# interrupts: Ctrl-C while a blocking call waits, a cancellation of the task on asyncio


def unanswered(service: ScriptedService, path: str) -> threading.Event:
    """The next request for `path` is acted on and gets no answer; the event is set once it was acted on."""
    acted, answer = threading.Event(), service._answer

    async def silent(request: web.BaseRequest, body: Any) -> web.Response:
        answered = await answer(request, body)
        if request.path == path and not acted.is_set():
            acted.set()
            await asyncio.Event().wait()  # until its caller hangs up or the service ends
        return answered

    service._answer = silent  # type: ignore[method-assign]  # this one fault needs the moment between commit and answer
    return acted


def interrupt_when(acted: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def strike() -> None:
        assert acted.wait(10)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=strike).start()


def test_an_interrupt_gives_back_the_lease_whose_answer_was_on_its_way(service):
    interrupt_when(unanswered(service, "/leases"))
    with RolloutClient(service.url) as client, pytest.raises(KeyboardInterrupt):
        next(client.leases(max_groups=2))
    assert (service.acked, service.released) == ([], ["g0", "g1"])


def test_an_interrupted_ack_of_a_trained_lease_is_sent_again(service):
    interrupt_when(unanswered(service, "/leases/l0/ack"))
    with RolloutClient(service.url) as client:
        leases = client.leases(max_groups=2)
        next(leases)
        with pytest.raises(KeyboardInterrupt):
            next(leases)
    assert (service.acked, service.released) == (["g0", "g1"], [])
    assert len(service.requests("/leases/l0/ack")) == 2


@pytest.mark.parametrize(
    ("path", "acked", "released"), [("/leases", [], ["g0", "g1"]), ("/leases/l0/ack", ["g0", "g1"], [])]
)
async def test_a_cancelled_loop_leaves_nothing_behind(service, path, acked, released):
    async def train(client: AsyncRolloutClient) -> None:
        async for _ in client.leases(max_groups=2):
            pass

    acted = unanswered(service, path)
    async with AsyncRolloutClient(service.url) as client:
        training = asyncio.create_task(train(client))
        assert await asyncio.to_thread(acted.wait, 10)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
    assert (service.acked, service.released) == (acked, released)
    assert not any(held.open for held in service.leases.values())
