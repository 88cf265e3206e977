"""What a batch may not do, as the in-memory store checks it; SQLite's schema refuses the same by checks and triggers.

What always holds: nothing is changed here; the first rule broken is named. The contract suite runs both stores over the
same batches, so the two lists cannot drift apart unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rollout_service.core.group import Checkpoint, Group, Lease, LeaseState
from rollout_service.core.model import TERMINAL
from rollout_service.core.model import GroupState as S
from rollout_service.core.records import Batch, RunState, StoredPrompt
from rollout_service.store.standing import forgotten

_SETTLED = frozenset({S.SCORING, S.READY, S.LEASED, S.ACKED})
_VERSION_OPTIONAL = frozenset({S.STALE, S.DROPPED, S.FAILED})


class Committed(Protocol):
    """What is committed before the batch."""

    @property
    def run(self) -> RunState: ...
    @property
    def groups(self) -> Mapping[int, Group]: ...
    @property
    def known(self) -> Mapping[tuple[str, int], StoredPrompt]: ...
    @property
    def rollouts(self) -> Mapping[int, Mapping[tuple[int, int], Any]]: ...
    @property
    def leases(self) -> Mapping[str, Lease]: ...
    @property
    def requests(self) -> Mapping[str, str]: ...
    @property
    def checkpoints(self) -> Mapping[str, Checkpoint]: ...


def refusal(batch: Batch, *, before: Committed, max_staleness: int) -> str | None:
    """The first rule `batch` breaks, judged by what it would leave behind; None where it breaks none."""
    standings = {seq: new.group for seq, new in batch.new_groups.items()} | batch.groups
    after = _Overlay(standings, before.groups)
    for broken in (
        _run(batch.run),
        _leases(batch, before, after),
        _groups(batch, before, standings),
        _rollouts(batch, before, after),
        _scores(batch, after),
        _checkpoints(batch, before),
        _guard(batch, before, after, max_staleness),
    ):
        first = next(broken, None)
        if first is not None:
            return first
    return None


class _Overlay:
    """The groups as the batch leaves them."""

    def __init__(self, changed: Mapping[int, Group], unchanged: Mapping[int, Group]) -> None:
        self._changed, self._unchanged = changed, unchanged

    def get(self, seq: int) -> Group | None:
        return self._changed.get(seq) or self._unchanged.get(seq)


def _run(run: RunState | None) -> Iterator[str]:
    if run is None:
        return
    if min(run.policy_version, run.last_seq, run.read_position, *run.ended.values(), 0) < 0:
        yield "a negative count in the run"
    if sum(run.ended.values()) > run.last_seq:
        yield "more groups ended than were submitted"


def _leases(batch: Batch, before: Committed, after: _Overlay) -> Iterator[str]:
    asked: set[str] = set()
    for lease in batch.leases.values():
        if lease.lease_id in before.leases:
            continue
        if not 0 <= lease.min_groups <= lease.max_groups or lease.max_groups < 1 or lease.lease_s < 1:
            yield f"lease {lease.lease_id} has impossible bounds"
        if lease.request_id is not None and (lease.request_id in before.requests or lease.request_id in asked):
            yield f"request {lease.request_id} has its lease already"
        if lease.request_id is not None:
            asked.add(lease.request_id)
        seqs = [seq for seq, _ in lease.groups]
        if len(set(seqs)) < len(seqs) or any(after.get(seq) is None for seq in seqs):
            yield f"lease {lease.lease_id} names a group twice or an unknown one"


def _groups(batch: Batch, before: Committed, standings: Mapping[int, Group]) -> Iterator[str]:
    identities = set()
    for seq, new in batch.new_groups.items():
        identity = new.group.prompt_id, new.group.epoch
        if seq in before.groups or identity in before.known or identity in identities:
            yield f"group {seq} or its prompt is known already"
        identities.add(identity)
    for seq, group in standings.items():
        was = before.groups.get(seq)
        if was is None and seq not in batch.new_groups:
            yield "a standing of a group that was never submitted"
        if was is not None and group.attempt < was.attempt:
            yield "the attempt of a group may not fall"
        if was is not None and was.state in TERMINAL and group.state is not was.state and group.attempt == was.attempt:
            yield "a group that ended goes on in a new attempt only"
        for lease_id in (group.lease_id, group.acked_by):
            if lease_id is not None and lease_id not in before.leases and lease_id not in batch.leases:
                yield f"group {seq} names an unknown lease"
        yield from _standing(group)


def _standing(group: Group) -> Iterator[str]:
    name, state = group.group_id, group.state
    if group.seq < 1 or group.epoch < 0 or group.num_generations < 1 or group.payload_bytes < 0:
        yield f"{name}: a number out of range"
    if not 1 <= group.tries <= group.attempt:
        yield f"{name}: {group.tries} tries in {group.attempt} attempts"
    if (group.version is None) is not (state is S.PENDING) and state not in _VERSION_OPTIONAL:
        yield f"{name}: {state} with version {group.version}"
    if group.version is not None and group.version < 0:
        yield f"{name}: version {group.version}"
    if (group.lease_id is None) is (state is S.LEASED) or (group.acked_by is None) is (state is S.ACKED):
        yield f"{name}: {state}, held by {group.lease_id}, acked by {group.acked_by}"
    if group.end_number is not None and (group.end_number < 1 or state not in TERMINAL):
        yield f"{name}: {state} with end number {group.end_number}"
    if (group.reason is None) is (state is S.DROPPED):
        yield f"{name}: {state} for {group.reason}"
    if len(set(group.rows)) < len(group.rows) or any(not 0 <= row < group.num_generations for row in group.rows):
        yield f"{name}: rows {group.rows} of {group.num_generations}"
    if state in _SETTLED and (group.waiting or group.running):
        yield f"{name}: {state} with unsettled rows"


def _rollouts(batch: Batch, before: Committed, after: _Overlay) -> Iterator[str]:
    for key in batch.rollouts:
        seq, attempt, index = key
        if forgotten(key, batch):
            continue
        group = after.get(seq)
        if group is None or group.attempt != attempt or index not in group.rows:
            yield "a rollout that is not of a row of the current attempt"
        if (attempt, index) in before.rollouts.get(seq, {}):
            yield "a settled rollout is never rewritten"


def _scores(batch: Batch, after: _Overlay) -> Iterator[str]:
    for key in batch.scores:
        group = after.get(key[0])
        if not forgotten(key, batch) and (group is None or group.attempt != key[1]):
            yield "a score of another attempt than the current one"


def _checkpoints(batch: Batch, before: Committed) -> Iterator[str]:
    kept = {name: made for name, made in before.checkpoints.items() if name not in batch.forget_checkpoints}
    numbers = {made.number for made in kept.values()}
    for name, made in batch.checkpoints.items():
        if name in kept or made.number in numbers:
            yield f"checkpoint {name} or its number is taken"
        if made.number < 1 or made.policy_version < 0 or made.ends < 0:
            yield f"checkpoint {name}: a number out of range"
        numbers.add(made.number)


def _guard(batch: Batch, before: Committed, after: _Overlay, max_staleness: int) -> Iterator[str]:
    """Design 3.1.5 and 4.1: what is held after this commit is held by the live lease made with it."""
    oldest = (batch.run or before.run).policy_version - max_staleness
    for seq, group in batch.groups.items():
        if group.state is S.LEASED and group.lease_id is not None:
            holder = batch.leases.get(group.lease_id) or before.leases[group.lease_id]
            made = before.leases.get(group.lease_id, holder)
            if holder.state is not LeaseState.LIVE or made.attempt_of(seq) != group.attempt:
                yield f"{group.group_id} may not be held by {group.lease_id}, which is over or another's"
    for lease in batch.leases.values():
        made = before.leases.get(lease.lease_id, lease)
        for seq, attempt in made.groups:
            now = after.get(seq)
            if now is None:
                continue  # refused above
            if lease.state is not LeaseState.LIVE:
                if now.lease_id == lease.lease_id:
                    yield f"lease {lease.lease_id} is over and still holds group {seq}"
            elif lease.lease_id not in before.leases:
                if now.version is None or now.version < oldest:
                    yield f"lease {lease.lease_id} may not take group {seq}: older than version {oldest}"
                elif now.state is not S.LEASED or now.lease_id != lease.lease_id or now.attempt != attempt:
                    yield f"lease {lease.lease_id} may not take group {seq}: {now.state}, held by {now.lease_id}"
