"""What a kill, a stop, a store that fails for a moment or a bump at the wrong instant leave behind: nothing half done.

Every test here holds one commit, one read or one task back and lets something else come first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest
import structlog

from rollout_service.core.group import Group, GroupPolicy
from rollout_service.core.model import DropReason, GroupState, Prompt, ScoreJob, Scores
from rollout_service.core.records import Batch, GroupPayload, Snapshot
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.errors import Conflict, Halted, StoreUnavailable
from rollout_service.orchestrator import LeaseRequest, LeaseStatus, Orchestrator, committer, intake, workshop, writer
from rollout_service.store import MemoryStore, SqliteStore
from tests.fakes import Harness, Runner, Scorer, failed, finished, prompt, submission, until

S = GroupState
ASK = LeaseRequest(max_groups=8, wait_s=5)
NOW = LeaseRequest(max_groups=8, wait_s=0)
PASSES = 20
"""Of the event loop: more than any chain of callbacks here needs."""


class Stepping:
    """A store whose commits wait for the test while `hold` is in force; one at a time, as the committer has it."""

    holding = False
    waiting: asyncio.Future[None] | None = None

    async def commit(self, batch: Batch) -> None:
        if self.holding:
            self.waiting = asyncio.get_running_loop().create_future()
            try:
                await self.waiting
            finally:
                self.waiting = None
        await super().commit(batch)  # type: ignore[misc]  # of the store this is mixed into

    def hold(self) -> None:
        self.holding = True

    async def held(self) -> asyncio.Future[None]:
        """The commit that waits now."""
        await until(lambda: self.waiting is not None and not self.waiting.done(), "a commit that waits")
        assert self.waiting is not None
        return self.waiting

    async def step(self) -> None:
        """Let the waiting commit through, and see the next one wait."""
        (await self.held()).set_result(None)
        await self.held()

    def free(self) -> None:
        self.holding = False
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class SteppedMemory(Stepping, MemoryStore):
    pass


class SteppedSqlite(Stepping, SqliteStore):
    pass


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Each call gives the same store as the next process finds it."""
    stores: list[SteppedMemory] = []

    def again() -> Any:
        if request.param == "sqlite":
            return SteppedSqlite(tmp_path / "r.db", max_staleness=4)
        stores.append(SteppedMemory.reopened(stores[-1]) if stores else SteppedMemory(4))
        return stores[-1]

    return again


def at_once() -> Runner:
    return Runner(answer=lambda job: finished(job.index))


async def passes(count: int = PASSES) -> None:
    """Let everything happen that can happen without the test."""
    for _ in range(count):
        await asyncio.sleep(0)


async def ready(door: Orchestrator, *keys: str) -> None:
    """Submit, and see the groups ready and nothing left to commit."""
    await door.submit([submission(key) for key in keys])
    await until(lambda: door.status().counts.groups[S.READY] >= len(keys), "ready groups")
    await until(lambda: door.writer.committer.idle, "everything committed")


async def states(door: Orchestrator) -> dict[str, GroupState]:
    return {group.prompt_id: group.state for group in await door.groups([], after=0, limit=100)}


async def on_disk(store: MemoryStore) -> Group:
    """Group 1 as a process finds it that starts now."""
    again = MemoryStore.reopened(store)
    await again.open()
    return (await again.groups([1]))[1]


# a rollout and its group


class Filmed(SteppedMemory):
    """Keeps what a kill after each commit would leave."""

    def __init__(self, max_staleness: int) -> None:
        super().__init__(max_staleness)
        self.frames: list[MemoryStore] = []

    async def commit(self, batch: Batch) -> None:
        await super().commit(batch)
        self.frames.append(MemoryStore.reopened(self))


def is_stuck(group: Group) -> bool:
    return group.state is S.GENERATING and not group.waiting


@pytest.mark.parametrize("after", range(6))
async def test_a_kill_at_any_commit_finds_no_group_generating_whose_rows_are_all_settled(
    after: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(committer, "GATHER_S", 0.0)  # so that a commit may begin at any step
    store = Filmed(4)
    harness = Harness(store=store)
    async with harness as door:
        await door.submit([submission("a", 2)])
        await until(lambda: len(harness.runner.held) == 2)
        store.hold()
        pausing = asyncio.create_task(door.pause())
        await store.held()
        store.free()
        await passes(after)  # so that in one of the cases the rows settle just when this commit ends
        harness.runner.release()
        await pausing
        await until(lambda: door.status().counts.groups[S.READY] == 1)
    seen = [await on_disk(frame) for frame in store.frames]
    assert [group.state for group in seen if group.state is S.SCORING or is_stuck(group)][:1] == [S.SCORING]
    assert not any(is_stuck(group) for group in seen)


@pytest.mark.parametrize("after", range(6))
async def test_a_stop_commits_settled_rollouts_together_with_what_they_did_to_their_group(after: int):
    store = MemoryStore(4)
    harness = Harness(store=store, scorer=Scorer(hold=asyncio.Event()))
    async with harness as door:
        await door.submit([submission("a", 2)])
        await until(lambda: len(harness.runner.held) == 2)
        harness.runner.release()
        await passes(after)
        await door.stop()
        decided = door.writer.core.groups[1]
    group = await on_disk(store)
    assert (group.state, group.finished) == (decided.state, decided.finished)
    assert not is_stuck(group)
    async with Harness(store=MemoryStore.reopened(store), runner=at_once()) as door:
        assert (await door.lease(ASK)).status is LeaseStatus.OK


@pytest.mark.parametrize(
    ("failures", "state"), [(0, S.READY), (2, S.READY), (3, S.DROPPED), (4, S.FAILED)], ids=lambda value: str(value)
)
async def test_a_group_found_generating_with_every_row_settled_goes_on(
    reopen: Callable[[], Any], failures: int, state: GroupState
):
    async with Harness(store=reopen()) as door:
        await door.submit([submission("a")])
        await until(lambda: door.status().slots_used == 4)
    found = reopen()
    await found.open()
    await found.load()
    await found.commit(
        Batch(rollouts={(1, 1, row): failed(row) if row < failures else finished(row) for row in range(4)})
    )
    await found.close()
    harness = Harness(store=reopen(), runner=at_once())
    async with harness as door:
        await until(lambda: door.status().counts.groups[state] == 1, str(state))
        assert harness.runner.jobs == [], "nothing is generated again"


# a checkpoint and a group that ends in one transaction


async def test_a_group_that_ends_in_the_transaction_of_a_checkpoint_can_be_opened_again(reopen: Callable[[], Any]):
    async with Harness(store=reopen(), runner=at_once()) as door:
        await ready(door, "a", "b")
        lease = (await door.lease(ASK)).lease
        assert lease is not None
        commits = door.writer.committer
        mark = asyncio.create_task(door.mark("step-1"))
        ack = asyncio.create_task(door.ack(lease.lease_id, None))
        await until(lambda: commits.batch.checkpoints or commits.idle)
        await asyncio.gather(mark, ack)
        assert (await mark).ends == 0
    async with Harness(store=reopen(), runner=at_once()) as door:
        assert (await door.rewind("step-1")).reopened_groups == 2
        answer = await door.lease(LeaseRequest(max_groups=2, min_groups=2, wait_s=5))
        assert {payload.group.prompt_id for payload in answer.payloads} == {"a", "b"}


# the prompts file and a failed commit


class Broken(MemoryStore):
    """A medium that, while a test says so, takes no commits and cannot be loaded."""

    broken = False
    breaks: Callable[[Batch], bool] = staticmethod(lambda batch: False)

    async def commit(self, batch: Batch) -> None:
        self.broken = self.broken or self.breaks(batch)
        if self.broken:
            raise StoreUnavailable("the disk is gone")
        await super().commit(batch)

    async def load(self) -> Snapshot:
        if self.broken:
            raise StoreUnavailable("the disk is gone")
        return await super().load()


class Rows:
    """A prompts file; what is read of it while the store is broken stays on its way until the store is back."""

    total, fingerprint = 600, "f"

    def __init__(self, store: Broken) -> None:
        self.store, self.back = store, threading.Event()
        self.read_while_broken: list[int] = []

    def read(self, position: int, count: int) -> Sequence[Prompt]:
        if self.store.broken:
            self.read_while_broken.append(position)
            self.back.wait(5)
        return [prompt(f"row-{at}", 2) for at in range(position, min(position + count, self.total))]


async def test_after_a_failed_commit_the_file_is_read_from_the_committed_position(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(intake, "RETRY_S", 0.001)
    monkeypatch.setattr(writer, "RELOAD_FIRST_S", 0.001)
    store = Broken(4)
    source = Rows(store)
    store.breaks = lambda batch: 512 in batch.new_groups and not harness.observer.failures
    policy = Policy(group=GroupPolicy(), slots=10_000, max_ready_groups=10_000)
    harness = Harness(store=store, policy=policy, source=source, digest=lambda p: p.prompt_id.encode())
    with structlog.testing.capture_logs() as logs:
        async with harness as door:
            await until(lambda: not door.status().store_ok)
            assert door.status().read_position == 512, "what memory says was never committed"
            tries = [log["event"] for log in logs].count("prompts_wait")
            await until(
                lambda: source.read_while_broken or [log["event"] for log in logs].count("prompts_wait") > tries + 1
            )
            store.broken = False
            await until(lambda: door.status().store_ok)
            source.back.set()
            await until(lambda: door.status().final)
            names = [group.prompt_id for group in await door.groups([], after=0, limit=1000)]
    assert names == [f"row-{at}" for at in range(600)], "every row once, in order"
    assert source.read_while_broken == []


async def test_rows_read_from_another_position_than_the_committed_one_are_not_taken():
    async with Harness(store=MemoryStore(4)) as door:
        with pytest.raises(StoreUnavailable, match="reloaded"):
            await door.take([submission("a")], read_from=512, read_position=513)
        assert (door.status().read_position, door.status().counts.submitted) == (0, 0)


# survivors that cannot be read


class Unreadable(MemoryStore):
    """Cannot give the payloads of group 1 the first `times` times."""

    times = 0
    asked = 0

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        if list(seqs) == [1]:
            self.asked += 1
            if self.asked <= self.times:
                raise StoreUnavailable("a page cannot be read")
        return await super().payloads(seqs)


async def found_scoring(times: int) -> Unreadable:
    """A store with one group whose survivors only it has."""
    store = Unreadable(4)
    harness = Harness(store=store, runner=at_once(), scorer=Scorer(hold=asyncio.Event()))
    async with harness as door:
        await door.submit([submission("lost")])
        await until(lambda: harness.scorer.jobs)
        await until(lambda: door.writer.committer.idle)
    again = Unreadable.reopened(store)
    again.times = times
    return again


async def test_survivors_that_cannot_be_read_cost_their_group_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workshop, "READ_FIRST_S", 0.0)
    harness = Harness(store=await found_scoring(10**6), runner=at_once())
    async with harness as door:
        await door.submit([submission("good")])
        answer = await door.lease(ASK)
        assert [payload.group.prompt_id for payload in answer.payloads] == ["good"]
        await until(lambda: door.status().counts.groups[S.DROPPED] == 1)
        (lost,) = await door.groups([S.DROPPED], after=0, limit=9)
        assert (lost.prompt_id, lost.reason) == ("lost", DropReason.UNSCORABLE)
        assert "a page cannot be read" in (lost.error or "")
        assert (harness.observer.failures, door.status().store_ok) == ([], True)
        assert harness.runner.cancelled == []


async def test_a_store_that_cannot_be_read_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(workshop, "READ_FIRST_S", 0.0)
    store = await found_scoring(2)
    harness = Harness(store=store)
    async with harness as door:
        answer = await door.lease(ASK)
        assert [payload.group.prompt_id for payload in answer.payloads] == ["lost"]
        assert (harness.runner.jobs, harness.observer.failures) == ([], [])
        assert store.asked >= 3


# tasks of before a reload


async def reloaded(door: Orchestrator, store: MemoryStore) -> None:
    """A commit fails, and the store is back."""
    store.fail_commits = OSError("disk full")
    with pytest.raises(StoreUnavailable):
        await door.pause()
    store.fail_commits = None
    await until(lambda: door.status().store_ok, "the store is tried again")


async def test_a_rollout_of_before_a_reload_settles_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "STOP_WORK_S", 0.01)
    let_go = asyncio.Event()
    old: list[int] = []

    class Stubborn(Runner):
        """Ends only when the test says so, and then with an answer, although it was cancelled."""

        async def run(self, job: Any, gate: Any) -> Any:
            try:
                return await super().run(job, gate)
            except asyncio.CancelledError:
                await let_go.wait()
                old.append(job.index)
                return finished(job.index, text="old")

    store = MemoryStore(4)
    harness = Harness(store=store, runner=Stubborn())
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        await reloaded(door, store)
        await until(lambda: len(harness.runner.held) == 4, "generated again")
        let_go.set()
        await until(lambda: len(old) == 4)
        await passes()
        assert len(harness.runner.held) == door.status().slots_used == 4
        assert harness.observer.settled == []
        harness.runner.release()
        (payload,) = (await door.lease(ASK)).payloads
        assert {rollout.completion for rollout in payload.rollouts.values()} == {"abc"}


async def test_scoring_of_before_a_reload_scores_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "STOP_WORK_S", 0.01)
    let_go, second = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    class Stubborn(Scorer):
        async def score(self, job: ScoreJob) -> Scores:
            self.jobs.append(job)
            if len(self.jobs) > 1:
                await second.wait()
                return self.answer(job)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await let_go.wait()
            ended.append(job.group_id)
            return Scores(rewards={"accuracy": [9.0, 8.0, 7.0, 6.0]})

    store = MemoryStore(4)
    harness = Harness(store=store, runner=at_once(), scorer=Stubborn())
    async with harness as door:
        await door.submit([submission("a")])
        await until(lambda: harness.scorer.jobs)
        await until(lambda: door.writer.committer.idle)
        await reloaded(door, store)
        await until(lambda: len(harness.scorer.jobs) == 2, "scored again")
        let_go.set()
        await until(lambda: ended)
        await passes()
        assert door.status().counts.groups[S.SCORING] == 1
        second.set()
        (payload,) = (await door.lease(ASK)).payloads
        assert payload.score is not None
        assert [payload.score.rows[row].reward for row in range(4)] == [0.0, 1.0, 2.0, 3.0]


# pacing

PACED = Policy(group=GroupPolicy(max_staleness=0), slots=16, admission=Admission.PACE, groups_per_step=1)


async def test_after_a_restart_leased_groups_of_the_current_version_count_against_the_pace_and_older_ones_do_not():
    store = MemoryStore(0)
    async with Harness(store=store, policy=PACED, runner=at_once()) as door:
        await door.submit([submission(key) for key in "abcd"])
        assert len((await door.lease(ASK)).payloads) == 1
        assert door.status().blocked == "pace"
    second = Harness(store=MemoryStore.reopened(store), policy=PACED, runner=at_once())
    async with second as door:
        await passes()
        assert (second.runner.jobs, door.status().blocked) == ([], "pace")
        await door.pause()
        await door.post_version(1)
    async with Harness(store=MemoryStore.reopened(second.store), policy=PACED, runner=at_once()) as door:
        await door.resume()
        await until(lambda: door.status().counts.groups[S.READY] == 1, "that of before the bump is in nobody's way")
        assert door.status().counts.groups[S.LEASED] == 1


def kept(part: object) -> int:
    """Things in the collections of a part of the service and of the parts it has; what a fake keeps does not count."""
    if isinstance(part, Mapping | Set | Sequence) and not isinstance(part, str):
        return len(part)
    if not type(part).__module__.startswith("rollout_service") or not hasattr(part, "__dict__"):
        return 0
    return sum(map(kept, vars(part).values()))


async def test_without_pacing_nothing_is_remembered_of_a_group_that_was_delivered():
    harness = Harness(store=MemoryStore(4), runner=at_once())
    sizes: list[int] = []
    async with harness as door:
        inside = door.writer
        for number in range(300):
            await door.submit([submission(f"p{number}", 2)])
            lease = (await door.lease(ASK)).lease
            assert lease is not None
            await door.ack(lease.lease_id, None)
            sizes.append(sum(map(kept, (inside.core, inside.survivors, inside.prompts, inside.work, inside.line))))
        assert door.status().counts.groups[S.ACKED] == 300
    assert max(sizes[150:]) <= max(sizes[:150]), "flat"


# halts


async def test_a_halt_that_was_said_survives_a_failed_commit_and_a_refused_resume():
    store = MemoryStore(4)
    harness = Harness(store=store, runner=Runner(answer=lambda job: failed(job.index)))
    async with harness as door:
        await door.submit([submission("bad")])
        await until(lambda: harness.observer.halts)
        harness.runner.answer = lambda job: None
        await door.submit([submission("next")])
        for call in (door.submit([submission("z")]), door.resume()):
            store.fail_commits = OSError("disk full")
            with pytest.raises(StoreUnavailable):
                await call
            store.fail_commits = None
            await until(lambda: door.status().store_ok)
            await passes()
            halt = door.status().halt
            assert halt is not None
            assert halt.group_id == "g-1"
            with pytest.raises(Halted):
                await door.lease(NOW)
        assert len(harness.runner.jobs) == 4, "only those of the group that failed"
        await door.resume()
        await reloaded(door, store)
        await until(lambda: len(harness.runner.held) == 4, "once resumed it stays so")
        assert door.status().halt is None


@pytest.mark.parametrize("wait_s", [0, 5])
async def test_a_lease_call_hears_of_a_halt_although_a_commit_is_running(wait_s: float):
    store = SteppedMemory(4)
    harness = Harness(store=store, runner=Runner(answer=lambda job: failed(job.index)))
    async with harness as door:
        await door.submit([submission("bad")])
        await until(lambda: harness.observer.halts)
        store.hold()
        submitting = asyncio.create_task(door.submit([submission("next")]))
        await store.held()
        asking = asyncio.create_task(door.lease(LeaseRequest(max_groups=1, wait_s=wait_s)))
        await passes()
        store.free()
        with pytest.raises(Halted):
            await asking
        await submitting


@pytest.mark.parametrize("releases", [False, True])
async def test_a_release_does_not_end_what_goes_wrong_in_a_row(releases: bool):
    policy = Policy(group=GroupPolicy(), slots=16, halt_after_failed_groups=2)
    harness = Harness(store=MemoryStore(4), policy=policy, runner=at_once())
    async with harness as door:
        await ready(door, "good")
        lease = (await door.lease(ASK)).lease
        assert lease is not None
        harness.runner.answer = lambda job: failed(job.index)
        await door.submit([submission("bad")])
        await until(lambda: door.status().counts.groups[S.FAILED] == 1)
        assert door.status().halt is None
        if releases:
            await door.release(lease.lease_id, None)
        await door.submit([submission("worse")])
        await until(lambda: door.status().counts.groups[S.FAILED] == 2)
        assert door.status().halt is not None


# leases that nobody could fetch


class Reading(MemoryStore):
    """Says what becomes of a read of payloads."""

    how: Callable[[], Any] | None = None

    async def payloads(self, seqs: Sequence[int]) -> Sequence[GroupPayload]:
        if self.how is not None:
            await self.how()
        return await super().payloads(seqs)


@pytest.mark.parametrize("request_id", [None, "step-1"])
@pytest.mark.parametrize("cancelled", [False, True], ids=["unreadable", "cancelled"])
async def test_a_lease_whose_answer_was_never_read_is_given_back_unless_it_can_be_fetched_again(
    request_id: str | None, cancelled: bool
):
    store = Reading(4)
    reading = asyncio.Event()

    async def fails() -> None:
        reading.set()
        if cancelled:
            await asyncio.Event().wait()
        raise StoreUnavailable("a page cannot be read")

    ask = LeaseRequest(max_groups=8, wait_s=0, request_id=request_id)
    async with Harness(store=store, runner=at_once()) as door:
        await ready(door, "a")
        store.how = fails
        asking = asyncio.create_task(door.lease(ask))
        await until(reading.is_set)
        if cancelled:
            asking.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else StoreUnavailable):
            await asking
        store.how = None
        assert await states(door) == {"a": S.READY if request_id is None else S.LEASED}
        assert door.status().leases == (0 if request_id is None else 1)
        assert [payload.group.prompt_id for payload in (await door.lease(ask)).payloads] == ["a"]


@pytest.mark.parametrize("gone", [False, True], ids=["delivered", "given back"])
async def test_a_lease_granted_while_the_service_stops_is_delivered_or_given_back(
    reopen: Callable[[], Any], gone: bool
):
    store = reopen()
    async with Harness(store=store, runner=at_once()) as door:
        await ready(door, "a")
        store.hold()
        asking = asyncio.create_task(door.lease(LeaseRequest(max_groups=8, wait_s=5, lease_s=86_400)))
        await store.held()
        if gone:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        stopping = asyncio.create_task(door.stop())
        await passes()
        store.free()
        await stopping
        answer = None if gone else await asking
    async with Harness(store=reopen()) as door:
        if answer is None:
            assert (await states(door), door.status().leases) == ({"a": S.READY}, 0)
        else:
            assert [payload.group.prompt_id for payload in answer.payloads] == ["a"]
            assert answer.lease is not None
            assert await door.ack(answer.lease.lease_id, None) == ["g-1"]


async def test_a_renewal_never_shortens_a_lease():
    harness = Harness(store=MemoryStore(4), runner=at_once())
    async with harness as door:
        await ready(door, "a")
        lease = (await door.lease(LeaseRequest(max_groups=1, wait_s=0, lease_s=600))).lease
        assert lease is not None
        assert (await door.renew(lease.lease_id, 1)).expires_at == lease.expires_at
        harness.clock.now += 599
        assert (await door.renew(lease.lease_id, 2)).expires_at == lease.expires_at + 1


# bumps and what is not committed yet


class Bumps:
    """A group opened at version 0 whose opening waits to be committed, and versions posted before that."""

    def __init__(self) -> None:
        self.store = SteppedMemory(0)
        self.harness = Harness(store=self.store, policy=Policy(group=GroupPolicy(max_staleness=0), slots=16))
        self.door = self.harness.door
        self.posts: list[asyncio.Task[Any]] = []

    async def open(self) -> None:
        self.store.hold()
        self.posts.append(asyncio.create_task(self.door.submit([submission("a", 8)])))
        await self.store.held()
        assert self.door.status().slots_used == 8

    async def post(self, version: int, *, reset: bool = False) -> None:
        self.posts.append(asyncio.create_task(self.door.post_version(version, reset=reset)))
        await until(lambda: self.door.writer.core.version == version)

    async def ends_at(self, version: int) -> None:
        """Every row is sent once, and no post cost anything."""
        self.store.free()
        _, *bumps = await asyncio.gather(*self.posts)
        jobs, observer = self.harness.runner.jobs, self.harness.observer
        await until(lambda: len(jobs) >= 8)
        await passes()
        assert sorted((job.index, job.attempt, job.policy_version) for job in jobs) == [
            (row, 1, version) for row in range(8)
        ]
        assert [(bump.stale_groups, bump.aborted_rollouts) for bump in bumps] == [(0, 0)] * len(bumps)
        assert (observer.aborted, observer.wasted) == (0, [])
        assert len(self.harness.runner.held) == self.door.status().slots_used == 8
        (group,) = await self.door.groups([], after=0, limit=9)
        assert (group.state, group.attempt, group.version) == (S.GENERATING, 1, version)


async def test_a_bump_before_the_commit_of_an_opening_costs_the_group_nothing():
    bumps = Bumps()
    async with bumps.harness:
        await bumps.open()
        await bumps.post(1)
        await bumps.store.step()
        await passes()
        assert bumps.harness.runner.jobs == [], "what was decided at version 0 is not sent at version 1"
        await bumps.ends_at(1)


@pytest.mark.parametrize("between", [False, True], ids=["both before it", "one before and one after it"])
async def test_two_bumps_around_the_commit_of_an_opening_cost_the_group_nothing(between: bool):
    bumps = Bumps()
    async with bumps.harness:
        await bumps.open()
        await bumps.post(1)
        if between:
            await bumps.store.step()
        await bumps.post(2)
        await bumps.ends_at(2)


@pytest.mark.parametrize("between", [False, True], ids=["both before it", "the reset after it"])
async def test_a_bump_and_a_reset_around_the_commit_of_an_opening_send_each_row_once(between: bool):
    bumps = Bumps()
    async with bumps.harness:
        await bumps.open()
        await bumps.post(1)
        if between:
            await bumps.store.step()
        await bumps.post(0, reset=True)
        await bumps.ends_at(0)


async def test_a_reset_before_the_commit_of_an_opening_sends_no_more_rows_than_there_are_slots_by_then():
    bumps = Bumps()
    async with bumps.harness as door:
        await bumps.open()
        bumps.harness.engines.capacity = 4
        await bumps.post(1)
        await bumps.post(0, reset=True)
        bumps.store.free()
        await asyncio.gather(*bumps.posts)
        await until(lambda: bumps.harness.runner.held)
        await passes()
        assert [job.index for job in bumps.harness.runner.jobs] == [0, 1, 2, 3]
        assert len(bumps.harness.runner.held) == door.status().slots_used == 4


async def test_a_cancellation_before_the_commit_of_an_opening_sends_nothing_and_aborts_nothing():
    bumps = Bumps()
    async with bumps.harness as door:
        await bumps.open()
        cancelling = asyncio.create_task(door.cancel("g-1"))
        await passes()
        bumps.store.free()
        assert (await cancelling).reason is DropReason.CANCELLED
        await passes()
        assert (bumps.harness.runner.jobs, bumps.harness.observer.aborted) == ([], 0)


async def test_a_bump_after_the_commit_of_an_opening_aborts_what_was_sent():
    bumps = Bumps()
    async with bumps.harness:
        await bumps.open()
        bumps.store.free()
        await until(lambda: len(bumps.harness.runner.held) == 8)
        bumped = await bumps.door.post_version(1)
        assert (bumped.stale_groups, bumped.aborted_rollouts) == (1, 8)
        await until(lambda: bumps.harness.observer.aborted == 8)


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "fails"])
async def test_the_version_shown_and_the_one_a_lower_post_is_refused_for_are_on_disk(fails: bool):
    store = SteppedMemory(4)
    async with Harness(store=store) as door:
        await door.post_version(7)
        store.hold()
        higher = asyncio.create_task(door.post_version(8))
        waiting = await store.held()
        lower = asyncio.create_task(door.post_version(7))
        await passes()
        assert (door.version, lower.done()) == (7, False)
        if fails:
            waiting.set_exception(StoreUnavailable("disk full"))
            for post in (higher, lower):
                with pytest.raises(StoreUnavailable):
                    await post
            store.free()
            await until(lambda: door.status().store_ok)
            assert door.version == 7
            assert (await door.post_version(7)).previous == 7
        else:
            store.free()
            assert (await higher).version == 8
            with pytest.raises(Conflict, match="below the current version 8"):
                await lower
            assert door.version == 8


async def test_requests_held_by_a_pause_go_on_only_after_the_resume_is_committed():
    further = asyncio.Event()
    sent: list[int] = []

    class Turns(Runner):
        """Makes a second engine request once the test lets it."""

        async def run(self, job: Any, gate: Any) -> Any:
            self.jobs.append(job)
            await further.wait()
            await gate.passed()
            sent.append(job.index)
            return await super().run(job, gate)

    store = SteppedMemory(4)
    harness = Harness(store=store, runner=Turns())
    async with harness as door:
        await door.submit([submission("a", 2)])
        await until(lambda: len(harness.runner.jobs) == 2)
        await door.pause()
        further.set()
        await passes()
        assert sent == []
        store.hold()
        resuming = asyncio.create_task(door.resume())
        await store.held()
        await passes()
        assert sent == [], "the store still says paused"
        store.free()
        await resuming
        await until(lambda: sorted(sent) == [0, 1])


async def test_a_halt_survives_a_refused_resume_although_an_earlier_commit_ends_in_between():
    store = SteppedMemory(4)
    harness = Harness(store=store, runner=Runner(answer=lambda job: failed(job.index)))
    async with harness as door:
        await door.submit([submission("bad")])
        await until(lambda: harness.observer.halts)
        harness.runner.answer = lambda job: None
        store.hold()
        submitting = asyncio.create_task(door.submit([submission("next")]))
        await store.held()
        resuming = asyncio.create_task(door.resume())
        await passes()
        await store.step()
        (await store.held()).set_exception(StoreUnavailable("disk full"))
        with pytest.raises(StoreUnavailable):
            await resuming
        store.free()
        await submitting
        await until(lambda: door.status().store_ok)
        assert door.status().halt is not None


async def test_a_lease_call_cancelled_just_when_it_is_granted_gives_the_groups_back():
    harness = Harness(store=MemoryStore(4))
    async with harness as door:
        asking = asyncio.create_task(door.lease(ASK))
        await until(lambda: door.status().waiting_lease_calls)
        harness.observer.group_delivered = lambda *_, **__: asking.cancel()
        await door.submit([submission("a")])
        await until(lambda: len(harness.runner.held) == 4)
        harness.runner.release()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await states(door) == {"a": S.READY}


class File:
    def __init__(self, fingerprint, *rows):
        self.fingerprint, self.rows, self.total = fingerprint, rows, len(rows)

    def read(self, position, count):
        return [prompt(row, 2) for row in self.rows[position : position + count]]


@pytest.mark.parametrize("fingerprint", ["changed", "longer"])
async def test_a_file_that_grew_is_read_although_the_first_commit_after_the_restart_fails(fingerprint, monkeypatch):
    monkeypatch.setattr(intake, "RETRY_S", 0.001)
    first = File("longer", "a", "b")
    second = File(fingerprint, "x", "a", "b", "y") if fingerprint == "changed" else File("longer", "a", "b", "x", "y")
    store = MemoryStore(4)
    async with Harness(store=store, source=first, digest=lambda p: p.prompt_id.encode()) as door:
        await until(lambda: door.status().final)

    class Hiccup(MemoryStore):
        failed = False

        async def commit(self, batch):
            if not self.failed:
                self.failed = True
                raise StoreUnavailable("disk full")
            await super().commit(batch)

    again = Hiccup.reopened(store)
    async with Harness(store=again, source=second, digest=lambda p: p.prompt_id.encode()) as door:
        await until(lambda: door.status().read_position == len(second.rows) and door.status().final and again.failed)
        assert set(await states(door)) == {"a", "b", "x", "y"}


async def test_a_group_that_ends_when_one_checkpoint_takes_the_place_of_another_can_be_opened_again(reopen):
    async with Harness(store=reopen(), runner=at_once()) as door:
        await door.mark("one")
        await ready(door, "a")
        lease = (await door.lease(ASK)).lease
        await asyncio.gather(door.forget("one"), door.mark("two"), door.ack(lease.lease_id, None))
        assert (await door.rewind("two")).reopened_groups == 1


async def test_a_halt_found_at_a_start_is_in_force():
    store = MemoryStore(4)
    async with Harness(store=store) as door:
        await door.submit([submission("a", 2), submission("b", 2)])
        await until(lambda: door.status().slots_used == 4)
    found = MemoryStore.reopened(store)
    await found.open()
    await found.load()
    await found.commit(Batch(rollouts={(1, 1, row): failed(row) for row in range(2)}))
    await found.close()
    harness = Harness(store=found)
    async with harness as door:
        await until(lambda: harness.observer.halts)
        assert door.status().halt is not None


async def test_the_status_shows_the_version_on_disk():
    store = SteppedMemory(4)
    async with Harness(store=store) as door:
        store.hold()
        posting = asyncio.create_task(door.post_version(8))
        await store.held()
        assert door.status().policy_version == door.version == 0
        store.free()
        await posting
