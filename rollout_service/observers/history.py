"""What the run has been doing, for people who look: the page, `top`, scripts.

What always holds: memory is bounded whatever the run does; everything here is of this process and starts anew with it;
`serial` rises with whatever a viewer should see soon.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from operator import itemgetter

from rollout_service.core.changes import Bumped, Halt, Moved
from rollout_service.core.group import Group
from rollout_service.core.lifecycle import EventKind
from rollout_service.core.model import FailedRollout, FinishedRollout, GroupState
from rollout_service.observers.fanout import Quiet


class RecentKind(StrEnum):
    """What happened."""

    HALTED = "halted"
    """Dispatch halted."""
    ENGINE_DOWN = "engine_down"
    """An engine gets no work any more."""
    ENGINE_UP = "engine_up"
    """An engine gets work again."""
    STORE_DOWN = "store_down"
    """The store cannot commit."""
    STORE_UP = "store_up"
    """The store commits again."""
    GROUP_FAILED = "group_failed"
    """Every rollout of a group failed."""
    GROUP_DROPPED = "group_dropped"
    """A group was left out."""
    ROLLOUT_FAILED = "rollout_failed"
    """One rollout failed for good."""
    GROUP_STALE = "group_stale"
    """A group lost work to a version."""
    VERSION = "version"
    """The policy version is another one."""


K = RecentKind
KEPT: Mapping[frozenset[RecentKind], int] = {
    frozenset({K.HALTED, K.ENGINE_DOWN, K.ENGINE_UP, K.STORE_DOWN, K.STORE_UP}): 15,
    frozenset({K.GROUP_FAILED, K.GROUP_DROPPED, K.ROLLOUT_FAILED}): 20,
    frozenset({K.GROUP_STALE, K.VERSION}): 15,
}
"""Of each class of what happens, the newest so many: a version that outdates a hundred groups must not push out the one
error that a person looks for."""
RECENT = sum(KEPT.values())
VERSIONS = 240
"""Points of the reward curve: more than a screen shows side by side."""
MOST_STALENESS = 32
"""Bars of staleness; everything above counts as this."""
WINDOW_S = 30.0
"""Rates are over this: a few long completions long, and short enough to see a stall."""
MAX_WORDS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Recent:
    """Something that happened, for people."""

    at: float
    """Unix seconds."""
    kind: RecentKind
    text: str
    group_id: str | None = None
    engine: str | None = None
    """URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Per second, over the last `window_s`."""

    window_s: float
    rollouts: float
    tokens: float
    groups: float
    """Delivered ones."""


class History(Quiet):
    """Observer with a bounded memory. `clock`: Unix seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.serial = 0
        self.finished = 0
        self.failed: Counter[str] = Counter()
        self.generated = self.delivered_tokens = self.aborts = self.halts = 0
        self.delivered = self.acked = self.stale = self.failed_groups = 0
        self.dropped: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.flow: Counter[tuple[GroupState, GroupState]] = Counter()
        self.staleness: Counter[int] = Counter()
        self._recent: dict[RecentKind, deque[tuple[int, Recent]]] = {}
        """Those of each kind, oldest first, with the serial at which they happened; the kinds of a class share one."""
        for kinds, most in KEPT.items():
            kept: deque[tuple[int, Recent]] = deque(maxlen=most)
            self._recent |= {kind: kept for kind in kinds}
        self._rewards: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._marks: deque[tuple[float, int, int, int]] = deque()
        self._healthy: dict[str, bool] = {}
        self._store_failed = False

    # what others read

    def rewards(self) -> list[tuple[int, int, float]]:
        """(policy version, groups, mean of their mean rewards) of delivered groups, by version."""
        return [(version, n, total / n) for version, (n, total) in sorted(self._rewards.items())]

    @property
    def recent(self) -> list[Recent]:
        """Oldest first, RECENT at most."""
        classes = {id(kept): kept for kept in self._recent.values()}.values()
        return [one for _, one in sorted(chain(*classes), key=itemgetter(0))]

    def rates(self) -> Rates | None:
        """None before there is a window to look back over."""
        if len(self._marks) < 2:
            return None
        (begin, *before), (end, *now) = self._marks[0], self._marks[-1]
        if end <= begin:
            return None
        rollouts, tokens, groups = ((b - a) / (end - begin) for a, b in zip(before, now, strict=True))
        return Rates(window_s=end - begin, rollouts=rollouts, tokens=tokens, groups=groups)

    # once a second

    def tick(self, engines: Mapping[str, str | None]) -> None:
        """`engines`: URL → None, or why it gets no work."""
        now = self._clock()
        self._marks.append((now, self.finished, self.generated, self.delivered))
        while self._marks[0][0] < now - WINDOW_S or self._marks[0][0] > now:  # a clock that was set back
            self._marks.popleft()
        for url, error in engines.items():
            was = self._healthy.get(url)
            if was is not (error is None):
                self._healthy[url] = error is None
                if error is not None:
                    self._say(K.ENGINE_DOWN, f"gets no work: {error}", engine=url)
                elif was is not None:
                    self._say(K.ENGINE_UP, "is healthy again", engine=url)
        for url in self._healthy.keys() - engines.keys():
            del self._healthy[url]

    # Observer

    def group_moved(self, moved: Moved) -> None:
        self.serial += 1
        before, after = moved.before, moved.after
        if before.state is not after.state:
            self.flow[before.state, after.state] += 1
        if moved.kind is EventKind.ACKED:
            self.acked += 1
        elif moved.kind is EventKind.OUTDATED:
            self.stale += 1
            went = "" if after.state.terminal else "; what was not sent goes on as another attempt"
            self._say(K.GROUP_STALE, f"{after.error or 'too old'}{went}", group_id=after.group_id)
        if after.state is GroupState.DROPPED and after.reason is not None:
            self.dropped[after.reason.value] += 1
            words = f"{after.reason.value}: {after.error}" if after.error else after.reason.value
            self._say(K.GROUP_DROPPED, words, group_id=after.group_id, engine=after.engine)
        elif after.state is GroupState.FAILED:
            self.failed_groups += 1
            self._say(K.GROUP_FAILED, after.error or "", group_id=after.group_id, engine=after.engine)

    def rollout_settled(self, outcome: FinishedRollout | FailedRollout, seconds: float, *, group_id: str) -> None:
        self.serial += 1
        if isinstance(outcome, FinishedRollout):
            self.finished += 1
            self.generated += outcome.output_tokens
            return
        self.failed[outcome.reason.value] += 1
        self.generated += outcome.wasted_tokens
        if outcome.wasted_tokens:
            self.wasted["failed"] += outcome.wasted_tokens
        text = f"{outcome.reason.value}: {outcome.error}"
        self._say(K.ROLLOUT_FAILED, text, group_id=group_id, engine=outcome.engine)

    def rollouts_aborted(self, count: int) -> None:
        self.aborts += count

    def tokens_wasted(self, tokens: int, reason: str) -> None:
        self.wasted[reason] += tokens
        if reason == "late":  # the only ones that no settled rollout has counted
            self.generated += tokens

    def group_delivered(self, group: Group, *, staleness: int, tokens: int, reward_mean: float | None) -> None:
        self.serial += 1
        self.delivered += 1
        self.delivered_tokens += tokens
        self.staleness[min(staleness, MOST_STALENESS)] += 1
        if reward_mean is not None and group.version is not None:
            n, total = self._rewards.get(group.version, (0, 0.0))
            self._rewards[group.version] = (n + 1, total + reward_mean)
            while len(self._rewards) > VERSIONS:
                del self._rewards[min(self._rewards)]

    def version_posted(self, bumped: Bumped) -> None:
        self.serial += 1
        text = f"policy version {bumped.previous} → {bumped.version}"
        if bumped.stale_groups or bumped.aborted_rollouts:
            text += f": {bumped.stale_groups} groups went stale, {bumped.aborted_rollouts} rollouts aborted"
        self._say(K.VERSION, text)

    def halted(self, halt: Halt) -> None:
        self.halts += 1
        self._say(K.HALTED, f"{halt.reason}: {halt.error}", group_id=halt.group_id, engine=halt.engine)

    def commit_failed(self, error: str) -> None:
        self._store_failed = True
        self._say(K.STORE_DOWN, f"cannot commit: {error}")

    def committed(self, seconds: float) -> None:
        if self._store_failed:
            self._store_failed = False
            self._say(K.STORE_UP, "commits again")

    def _say(self, kind: RecentKind, text: str, *, group_id: str | None = None, engine: str | None = None) -> None:
        self.serial += 1
        words = text if len(text) <= MAX_WORDS else f"{text[:MAX_WORDS]}…"
        said = Recent(at=self._clock(), kind=kind, text=words, group_id=group_id, engine=engine)
        self._recent[kind].append((self.serial, said))
