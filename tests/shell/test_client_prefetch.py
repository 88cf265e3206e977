"""Leases asked for while the trainer computes. Every test runs on both drivers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import DRIVERS, Fault, ScriptedService, group, problem
from trainer_client import Halted, RolloutClient, ServiceUnreachable


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
    hold = threading.Event()
    made = service._answer

    async def slow(request: web.BaseRequest, body: Any) -> web.Response:
        answer = await made(request, body)
        if request.path == "/leases" and len(service.leases) == 2 and not hold.is_set():
            hold.set()
            await service._stopping.wait()  # the lease is made, its answer never comes
        return answer

    service._answer = slow  # type: ignore[method-assign]  # this one fault needs the moment between commit and answer
    with connect().prefetch(max_groups=2) as leases:
        next(leases)
        assert hold.wait(10)
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
    with connect().prefetch(max_groups=2, lease_s=2) as leases:
        next(leases)
        leased(service, 2)
        service.wait_for(lambda: all(held.renewals >= 2 for held in service.leases.values()))


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
    assert service.seen[-1].path.endswith("/ack")  # and no lease is looked for that a halt did not make


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
