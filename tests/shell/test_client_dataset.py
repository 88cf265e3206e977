"""Steps of leased groups as a torch dataset: one trainer, and ranks as threads, against the scripted service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import Fault, ScriptedService, group, problem
from trainer_client import ClientError, Conflict, Group, Halted, InvalidRequest, RolloutClient, ServiceUnreachable

torch = pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")

from torch.utils.data import DataLoader  # noqa: E402  (imports torch)

from trainer_client.tensors import RolloutDataset  # noqa: E402  (imports torch)
from trainer_client.tensors.ranks import Ranks  # noqa: E402  (imports torch)
from trainer_client.tensors.shared import SharedLeases  # noqa: E402  (imports torch)

WITHIN_S = 30.0


class SharingService(ScriptedService):
    """Callers with one request id share one wait, as at the real service; no lease has more than `most` groups."""

    most = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turns: dict[str, asyncio.Lock] = {}

    async def _lease(self, body: dict[str, Any]) -> web.Response:
        async with self._turns.setdefault(body["request_id"], asyncio.Lock()):
            return await super()._lease(body | {"max_groups": min(body["max_groups"], self.most)})


@pytest.fixture
def service() -> Iterator[SharingService]:
    service = SharingService(ready=[group(f"g{i}") for i in range(5)])
    service.start()
    yield service
    service.stop()


def ids(groups: list[Group]) -> list[str]:
    return [g.group_id for g in groups]


def in_threads(world: int, train: Callable[[int], Any]) -> list[Any]:
    """What `train(rank)` returned or raised, rank by rank."""
    with ThreadPoolExecutor(world) as pool:
        running = [pool.submit(train, rank) for rank in range(world)]
        return [job.exception(WITHIN_S) or job.result() for job in running]


# one rank


def test_each_element_is_a_step_and_asking_for_the_next_acks_it(service):
    seen = []
    for groups in RolloutDataset(service.url, 2):
        seen.append(ids(groups))
        assert service.acked == [name for step in seen[:-1] for name in step]
    assert seen == [["g0", "g1"], ["g2", "g3"], ["g4"]]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_the_next_step_is_fetched_while_this_one_is_trained(service):
    steps = iter(RolloutDataset(service.url, 2))
    next(steps)
    service.wait_for(lambda: len(service.leases) == 2)
    assert service.acked == []
    steps.close()


def test_collate_makes_the_elements(service):
    assert list(RolloutDataset(service.url, groups_per_step=2, collate=len)) == [2, 2, 1]


def test_min_groups_lets_a_step_begin_with_fewer(service):
    service.ready, service.exhausted_when_empty = [group("g0")], False
    steps = iter(RolloutDataset(service.url, 4, min_groups=1))
    assert ids(next(steps)) == ["g0"]
    steps.close()


@pytest.mark.parametrize("leave", ["break", "exception", "collate"])
def test_leaving_the_loop_early_gives_the_step_in_hand_back(service, leave):
    def collate(groups: list[Group]) -> list[Group]:
        if leave == "collate" and ids(groups) == ["g2", "g3"]:
            raise ZeroDivisionError
        return groups

    def train() -> None:
        for groups in RolloutDataset(service.url, 2, collate=collate):
            if ids(groups) == ["g2", "g3"]:
                if leave == "break":
                    break
                raise ZeroDivisionError

    if leave == "break":
        train()
    else:
        with pytest.raises(ZeroDivisionError):
            train()
    service.wait_for(lambda: "g2" in service.released)
    assert service.acked == ["g0", "g1"]
    assert {"g2", "g3"} <= set(service.released)


def test_a_step_acked_before_a_break_is_not_given_back(service):
    dataset = RolloutDataset(service.url, 2)
    dataset.ack()  # nothing is in hand yet
    for groups in dataset:
        dataset.ack()
        assert service.acked == ids(groups)
        dataset.ack()
        break
    dataset.ack()
    assert service.acked == ["g0", "g1"]
    assert not {"g0", "g1"} & set(service.released)


def test_a_halt_raises(service):
    service.halted = {"error": "out of memory"}
    with pytest.raises(Halted, match="out of memory"):
        list(RolloutDataset(service.url, 3))


def test_it_may_be_iterated_again_and_goes_on_with_what_there_is_then(service):
    dataset = RolloutDataset(service.url, 4)
    assert [ids(groups) for groups in dataset] == [["g0", "g1", "g2", "g3"], ["g4"]]
    assert list(dataset) == []
    service.change(ready=[group("g5")])
    assert [ids(groups) for groups in dataset] == [["g5"]]


def test_a_second_iterator_beside_an_open_one_is_refused(service):
    dataset = RolloutDataset(service.url, 1)
    first = iter(dataset)
    next(first)
    with pytest.raises(RuntimeError, match="being iterated already"):
        iter(dataset)
    first.close()
    assert next(iter(dataset))


def test_two_iterators_made_before_either_was_used_do_not_both_run(service):
    dataset = RolloutDataset(service.url, 1)
    first, second = iter(dataset), iter(dataset)
    next(first)
    with pytest.raises(RuntimeError, match="being iterated already"):
        next(second)
    assert next(first)  # and the one that runs is none the worse for it
    first.close()


def test_the_trainers_own_client_knows_the_versions_and_stays_open(service):
    service.ready = [group("g0", 0), group("g1", 0), group("g2", 9)]
    with RolloutClient(service.url) as client:
        seen = []
        for groups in RolloutDataset(client, 1):
            service.wait_for(lambda: len(service.leases) >= 2)
            seen += ids(groups)
            client.post_version(9)
        assert seen == ["g0", "g2"]  # g1 waited until it was too old
        assert client.status().policy_version == 9
    assert service.released == ["g1"]


def test_a_data_loader_without_workers_gives_the_same_steps(service):
    loader = DataLoader(RolloutDataset(service.url, 2, collate=ids), batch_size=None)
    assert list(loader) == [["g0", "g1"], ["g2", "g3"], ["g4"]]


def test_a_data_loader_with_workers_is_refused_before_anything_is_leased(service):
    loader = DataLoader(RolloutDataset(service.url, 2), batch_size=None, num_workers=1)
    with pytest.raises(RuntimeError, match="would ack steps before they are trained"):
        next(iter(loader))
    assert service.seen == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": 0}, "rank and world are given together"),
        ({"rank": 2, "world": 2}, "rank from 0 to world - 1"),
        ({"barrier": int, "rank": 0, "world": 2}, "same run_id"),
        ({"barrier": int, "run_id": "r"}, "rank and world"),
        ({"rank": 0, "world": 2}, "initialise torch.distributed, or pass a barrier"),
        ({"rank": 0, "world": 3, "barrier": int, "run_id": "r"}, "2 groups a step are fewer than the 3 ranks"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(service, wrong, said):
    with pytest.raises(ValueError, match=said):
        list(RolloutDataset(service.url, 2, **wrong))
    assert service.seen == []


def test_ranks_that_do_not_know_each_other_yet_are_refused(service, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        list(RolloutDataset(service.url, 2))
    assert len(list(RolloutDataset(service.url, 5, rank=0, world=1))) == 1


# ranks that can merely wait for each other


def trained_by(service: SharingService, world: int, **options: Any) -> list[list[list[str]]]:
    """[rank][step] -> groups."""
    barrier = threading.Barrier(world)

    def train(rank: int) -> list[list[str]]:
        wait = {"barrier": lambda: barrier.wait(WITHIN_S), "rank": rank, "world": world}
        defaults = {"run_id": "run", "collate": ids, "groups_per_step": 4}
        return list(RolloutDataset(service.url, **{**wait, **defaults, **options}))

    return in_threads(world, train)


def test_ranks_share_the_lease_of_each_step_and_every_group_is_trained_once(service):
    service.ready = [group(f"g{i}") for i in range(8)]
    assert trained_by(service, 2) == [[["g0", "g2"], ["g4", "g6"]], [["g1", "g3"], ["g5", "g7"]]]
    assert service.acked == [f"g{i}" for i in range(8)]
    assert list(service.leases) == ["run-1", "run-2"]
    assert len(service.requests("/leases/l0/ack")) == len(service.requests("/leases/l1/ack")) == 1
    assert service.released == []


def test_at_a_ragged_end_ranks_without_groups_get_an_element_too(service):
    first, second, third = trained_by(service, 3)
    assert first == [["g0", "g3"], ["g4"]]
    assert second == [["g1"], []]
    assert third == [["g2"], []]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_a_whole_step_goes_to_every_rank(service):
    first, second = trained_by(service, 2, whole_step=True, groups_per_step=1)
    assert first == second == [[f"g{i}"] for i in range(5)]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]


def test_even_ranks_end_together_and_what_is_left_is_given_back_by_name(service, caplog):
    assert trained_by(service, 2, even=True) == [[["g0", "g2"]], [["g1", "g3"]]]
    assert service.acked == ["g0", "g1", "g2", "g3"]
    assert service.released == ["g4"]
    assert "fewer groups than the 2 ranks are given back: g4" in caplog.text


def test_even_ranks_give_back_what_does_not_divide_and_train_the_rest(service):
    steps = trained_by(service, 2, even=True, groups_per_step=3, min_groups=1)
    assert steps == [[["g0"], ["g3"]], [["g1"], ["g4"]]]
    assert service.acked == ["g0", "g1", "g3", "g4"]
    assert service.released == ["g2"]


def test_even_ranks_tell_a_halt_from_the_end(service):
    service.halted = {"reason": "1 failed group in a row", "error": "out of memory"}
    leader, _ = trained_by(service, 2, even=True)
    assert isinstance(leader, Halted)
    assert "out of memory" in str(leader)
    assert service.released == ["g4"]


def test_what_does_not_divide_is_given_back_before_the_step_is_trained(service):
    """With the ack it would be too late: the other ranks may have asked for the next lease by then."""
    steps = trained_by(service, 2, even=True, groups_per_step=5, collate=lambda _: list(service.released))
    assert steps == [[["g4"]], [["g4"]]]


def test_even_ranks_that_get_too_small_leases_say_why(service):
    service.most = 1
    leader, _ = trained_by(service, 2, even=True)
    assert isinstance(leader, ClientError)
    assert "a lease of 1 groups cannot be divided evenly among 2 ranks, though 4 are outstanding" in str(leader)
    assert service.released == ["g0"]


def test_all_ranks_ask_again_under_the_same_id_until_there_are_groups(service):
    service.ready, service.exhausted_when_empty = [], False

    def refill() -> None:
        service.wait_for(lambda: len(service.requests("/leases")) >= 6, WITHIN_S)
        service.change(ready=[group(f"g{i}") for i in range(4)], exhausted_when_empty=True)

    waiting = threading.Thread(target=refill)
    waiting.start()
    assert trained_by(service, 2, wait_s=0) == [[["g0", "g2"]], [["g1", "g3"]]]
    waiting.join()
    assert {seen.body["request_id"] for seen in service.requests("/leases") if seen.path == "/leases"} == {
        "run-1",
        "run-2",
    }


def test_a_second_iteration_uses_new_request_ids(service):
    barrier = threading.Barrier(2)

    def train(rank: int) -> list[list[str]]:
        dataset = RolloutDataset(
            service.url, 2, collate=ids, rank=rank, world=2, barrier=lambda: barrier.wait(WITHIN_S), run_id="run"
        )
        seen = list(dataset)
        barrier.wait(WITHIN_S)
        if rank == 0:
            service.change(ready=[group("g8"), group("g9")])
        barrier.wait(WITHIN_S)
        return seen + list(dataset)

    first, second = in_threads(2, train)
    assert first == [["g0"], ["g2"], ["g4"], ["g8"]]
    assert second == [["g1"], ["g3"], [], ["g9"]]


def test_a_run_id_used_before_is_a_conflict_that_says_so(service):
    trained_by(service, 2)
    service.change(ready=[group("g9")])
    for error in trained_by(service, 2):
        assert isinstance(error, Conflict)
        assert "run-1" in str(error)


def test_rank_0_renews_the_lease_while_the_step_is_trained_and_stops_with_it(service):
    barrier = threading.Barrier(2)

    def train(rank: int) -> None:
        dataset = RolloutDataset(
            service.url, 4, rank=rank, world=2, lease_s=4, run_id="run", barrier=lambda: barrier.wait(WITHIN_S)
        )
        for _ in dataset:
            if rank == 1:
                service.wait_for(lambda: all(held.renewals >= 2 for held in service.leases.values()), WITHIN_S)

    assert in_threads(2, train) == [None, None]
    assert service.acked == ["g0", "g1", "g2", "g3", "g4"]
    assert not [thread for thread in threading.enumerate() if thread.name == "trainer-client-renewal"]


def test_rank_0_gives_the_step_back_as_it_leaves_and_the_others_do_nothing(service):
    barrier = threading.Barrier(2)
    given_back = threading.Event()

    def train(rank: int) -> None:
        wait = {"barrier": lambda: barrier.wait(WITHIN_S), "rank": rank, "world": 2}
        with RolloutClient(service.url) as client:  # the trainer's own: its end gives back what is held, which is late
            steps = iter(RolloutDataset(client, 4, run_id="run", **wait))
            next(steps)
            barrier.wait(WITHIN_S)
            if rank == 0:
                assert given_back.wait(WITHIN_S)
            steps.close()
            if rank == 1:
                assert service.released == []
                given_back.set()
            else:
                assert service.released == ["g0", "g1", "g2", "g3"]

    assert in_threads(2, train) == [None, None]
    assert service.acked == []


def test_a_rank_that_failed_leaves_the_others_to_whatever_ends_them(service):
    """Here it breaks the barrier, as torchrun ends the processes: rank 0 gives the step back."""
    barrier = threading.Barrier(2)

    def train(rank: int) -> None:
        wait = {"barrier": lambda: barrier.wait(WITHIN_S), "rank": rank, "world": 2}
        for _ in RolloutDataset(service.url, 4, run_id="run", **wait):
            if rank == 1:
                barrier.abort()
                raise ZeroDivisionError

    leader, other = in_threads(2, train)
    assert isinstance(other, ZeroDivisionError)
    assert isinstance(leader, threading.BrokenBarrierError)
    assert (service.acked, service.released) == ([], ["g0", "g1", "g2", "g3"])


def test_all_ranks_ack_a_step_before_they_break(service):
    barrier = threading.Barrier(2)

    def train(rank: int) -> list[str]:
        dataset = RolloutDataset(
            service.url, 4, rank=rank, world=2, run_id="run", barrier=lambda: barrier.wait(WITHIN_S)
        )
        steps = iter(dataset)
        groups = next(steps)
        dataset.ack()
        dataset.ack()
        steps.close()
        return ids(groups)

    assert in_threads(2, train) == [["g0", "g2"], ["g1", "g3"]]
    assert (service.acked, service.released) == (["g0", "g1", "g2", "g3"], [])


def test_a_lease_that_was_lost_is_a_warning_and_the_run_goes_on(service, caplog):
    barrier = threading.Barrier(2)

    def train(rank: int) -> int:
        wait = {"barrier": lambda: barrier.wait(WITHIN_S), "rank": rank, "world": 2}
        steps = 0
        for _ in RolloutDataset(service.url, 4, run_id="run", **wait):
            steps += 1
            barrier.wait(WITHIN_S)
            service.leases["run-1"].open.clear()
        return steps

    assert in_threads(2, train) == [2, 2]
    assert service.acked == ["g4"]
    assert "lease l0 was lost before its ack; trained, but not ours: g0, g1, g2, g3" in caplog.text


# ranks that tell each other


class Meeting:
    """Gathers as torch.distributed does, between threads."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world)
        self._values: list[Any] = [None] * world

    def ranks(self, rank: int) -> Ranks:
        world = len(self._values)

        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(WITHIN_S)
            values = list(self._values)
            self._barrier.wait(WITHIN_S)
            return values

        return Ranks(rank=rank, world=world, processes=world, leads=rank == 0, gather=gather)


ASK = {"max_groups": 4, "min_groups": 1, "wait_s": 5, "lease_s": 600}


def told_each_other(world: int, urls: list[str], train: Callable[[int, SharedLeases], Any]) -> list[Any]:
    meeting = Meeting(world)

    def one(rank: int) -> Any:
        with RolloutClient(urls[rank % len(urls)], retry_for_s=0.0) as client:
            shared = SharedLeases(client, meeting.ranks(rank), ASK, even=False)
            try:
                return train(rank, shared)
            finally:
                shared.close()

    return in_threads(world, one)


def test_a_rank_that_cannot_reach_the_service_ends_the_run_on_all(service):
    gone = ScriptedService().start()
    gone.stop()
    outcome = told_each_other(2, [service.url, gone.url], lambda _, shared: shared.take("a-1"))
    assert all(isinstance(error, ServiceUnreachable) for error in outcome)
    assert "raised on another rank" in outcome[0].__notes__
    assert service.released == ["g0", "g1", "g2", "g3"]


def test_an_ack_that_fails_ends_the_run_on_all(service):
    def train(rank: int, shared: SharedLeases) -> None:
        shared.take("a-1")
        if rank == 0:
            service.faults.append(Fault("/leases/l0/ack", answer=lambda: problem(422, "invalid", "no")))
        shared.take("a-2")

    leader, other = told_each_other(2, [service.url], train)
    assert isinstance(leader, InvalidRequest)
    assert isinstance(other, InvalidRequest)
    assert service.acked == []
    assert sorted(service.released) == ["g0", "g1", "g2", "g3"]


def test_a_group_cancelled_between_two_answers_is_trained_by_nobody(service):
    """Else the ranks would count differently, and train some group twice or never."""
    answered = []
    answer = service._lease_answer

    def without_g1_the_second_time(status: str, held: Any) -> web.Response:
        if held is not None:
            answered.append(held)
            if len(answered) == 2:
                held.groups = [g for g in held.groups if g["group_id"] != "g1"]
        return answer(status, held)

    service._lease_answer = without_g1_the_second_time  # type: ignore[method-assign]  # this one fault needs the moment between two answers
    first, second = told_each_other(2, [service.url], lambda _, shared: ids(shared.take("a-1").groups))
    assert first == second == ["g0", "g2", "g3"]


def test_ranks_with_different_answers_stop(service):
    other = SharingService(ready=[])
    other.start()
    try:
        outcome = told_each_other(2, [service.url, other.url], lambda _, shared: shared.take("a-1"))
    finally:
        other.stop()
    assert all(isinstance(error, ClientError) and "different answers" in str(error) for error in outcome)
    assert service.released == ["g0", "g1", "g2", "g3"]


def test_a_share_that_is_nobodys_is_refused_on_all():
    meeting = Meeting(2)

    def first(rank: int) -> str:
        ranks = meeting.ranks(rank)
        return Ranks(rank=0, world=2, processes=2, leads=rank == 0, gather=ranks.gather).first(f"run of {rank}")

    assert all("do not divide a step" in str(error) for error in in_threads(2, first))
    assert in_threads(2, lambda rank: meeting.ranks(rank).first(f"run of {rank}")) == ["run of 0", "run of 0"]
