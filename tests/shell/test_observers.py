"""What the history keeps, and that it stays small."""

from __future__ import annotations

import inspect

from rollout_service.core.changes import Bumped, Moved
from rollout_service.core.group import Group
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import GroupState
from rollout_service.metrics import Metrics
from rollout_service.observers import History, Observers, OutcomeLog
from rollout_service.observers.fanout import Quiet
from rollout_service.observers.history import MAX_WORDS, VERSIONS, WINDOW_S
from rollout_service.orchestrator.parts import Observer
from tests.fakes import Clock, Recorder, failed, finished


def group(seq: int = 1, *, version: int = 0, state: GroupState = GroupState.LEASED) -> Group:
    return Group(
        seq=seq,
        prompt_id=f"p{seq}",
        epoch=0,
        num_generations=2,
        waiting=(),
        version=version,
        state=state,
        submitted_at=0.0,
        changed_at=0.0,
    )


def test_everybody_hears_everything_of_the_protocol():
    told = [name for name, member in inspect.getmembers(Observer, inspect.isfunction) if not name.startswith("_")]
    assert len(told) == 10
    for kind in (Quiet, Observers, Metrics, Recorder):
        for name in told:
            assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Observer, name)), (kind, name)


def test_observers_pass_on_each_event_to_each_in_order():
    heard: list[str] = []

    class One(Quiet):
        def __init__(self, name: str) -> None:
            self.name = name

        def committed(self, seconds: float) -> None:
            heard.append(f"{self.name} {seconds}")

    Observers(One("a"), One("b")).committed(0.5)
    assert heard == ["a 0.5", "b 0.5"]


def test_memory_is_bounded_whatever_the_run_does():
    history, log = History(Clock()), OutcomeLog()
    for seq in range(3000):
        history.version_posted(Bumped(version=seq + 1, previous=seq, stale_groups=0, aborted_rollouts=0))
        history.rollout_settled(failed(0, error="x" * 10_000), 1.0, group_id=f"g-{seq}")
        delivered = group(seq, version=seq)
        history.group_delivered(delivered, staleness=seq, tokens=1, reward_mean=0.5)
        log.group_delivered(delivered, staleness=0, tokens=1, reward_mean=0.5)
        acked = Moved(before=delivered, after=group(seq, version=seq, state=GroupState.ACKED), kind=EventKind.ACKED)
        history.group_moved(acked)
        log.group_moved(acked)
        history.tick({"http://e": None})
    assert len(history.recent) == 20 + 15
    assert all(len(one.text) <= MAX_WORDS + 1 for one in history.recent)
    assert len(history.rewards()) == VERSIONS
    assert history.rewards()[-1] == (2999, 1, 0.5)
    assert len(history.staleness) == 33
    assert log._stories == {}


def test_a_flood_of_one_kind_pushes_nothing_of_another_out():
    history = History(Clock())
    history.tick({"http://e": "refused"})
    history.rollout_settled(failed(0), 1.0, group_id="g-1")
    for version in range(100):
        history.version_posted(Bumped(version=version + 1, previous=version, stale_groups=9, aborted_rollouts=0))
    kinds = [one.kind for one in history.recent]
    assert kinds == ["engine_down", "rollout_failed"] + ["version"] * 15


def test_rates_are_over_the_last_half_minute():
    clock = Clock()
    history = History(clock)
    assert history.rates() is None
    for _ in range(100):
        history.tick({})
        history.rollout_settled(finished(0, ids=(1, 2)), 1.0, group_id="g-1")
        clock.now += 1.0
    rates = history.rates()
    assert rates is not None
    assert (rates.window_s, rates.rollouts, rates.tokens, rates.groups) == (WINDOW_S, 1.0, 2.0, 0.0)
    clock.now -= 5_000  # set back
    history.tick({})
    history.tick({})
    assert history.rates() is None


def test_an_engine_that_goes_and_comes_back_is_told_once_each():
    history = History(Clock())
    history.tick({"http://a": None, "http://b": "refused"})
    history.tick({"http://a": "timed out", "http://b": "refused"})
    history.tick({"http://a": None})
    history.tick({"http://a": None, "http://b": None})
    assert [(one.kind, one.engine) for one in history.recent] == [
        ("engine_down", "http://b"),
        ("engine_down", "http://a"),
        ("engine_up", "http://a"),
    ]


def test_a_store_that_fails_and_commits_again_is_told():
    history = History(Clock())
    history.committed(0.1)
    history.commit_failed("disk full")
    history.committed(0.1)
    history.committed(0.1)
    assert [(one.kind, one.text) for one in history.recent] == [
        ("store_down", "cannot commit: disk full"),
        ("store_up", "commits again"),
    ]
