"""How a store keeps a group's rows, and what a stored group looks like when it is read again.

What always holds: a store knows nothing of rows in flight. Of an outstanding group the settled rollouts of its current
attempt say which rows are finished and failed, whatever its last written standing claimed; every other row waits. Of a
group that ended the last written standing is the whole truth, because its payloads may be gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from rollout_service.core.group import Group
from rollout_service.core.model import TERMINAL, GroupState
from rollout_service.core.records import Batch, RunState

WAITING, FINISHED, FAILED, USED_UP = "w", "f", "x", "-"


def rows_text(group: Group) -> str:
    """One letter a row of the whole prompt: waiting or in flight, finished, failed, used up by an earlier attempt.

    Raises ValueError where a row stands in two places or the prompt has no such row.
    """
    letters = [USED_UP] * group.num_generations
    for rows, letter in (
        (group.waiting, WAITING),
        (group.running, WAITING),
        (group.finished, FINISHED),
        (group.failed, FAILED),
    ):
        for row in rows:
            if not 0 <= row < group.num_generations or letters[row] != USED_UP:
                raise ValueError(f"{group.group_id}: row {row} stands in two places, or the prompt has no such row")
            letters[row] = letter
    return "".join(letters)


def rows_from(text: str) -> tuple[tuple[int, ...], frozenset[int], frozenset[int]]:
    """(waiting, finished, failed) of a `rows_text`."""
    waiting = tuple(row for row, letter in enumerate(text) if letter == WAITING)
    finished = frozenset(row for row, letter in enumerate(text) if letter == FINISHED)
    return waiting, finished, frozenset(row for row, letter in enumerate(text) if letter == FAILED)


def rows_as_read(
    text: str, settled: Mapping[int, tuple[bool, int]]
) -> tuple[tuple[int, ...], frozenset[int], frozenset[int], int]:
    """(waiting, finished, failed, payload bytes) of an outstanding group.

    `text` is a `rows_text`, `settled` is row -> (finished?, payload bytes) of its current attempt.
    """
    waiting = tuple(row for row, letter in enumerate(text) if letter != USED_UP and row not in settled)
    finished = frozenset(row for row, (ok, _) in settled.items() if ok)
    return waiting, finished, frozenset(settled) - finished, sum(size for ok, size in settled.values() if ok)


def as_read(group: Group, settled: Mapping[int, tuple[bool, int]]) -> Group:
    """`group` as a store gives it back; `settled` as for `rows_as_read`."""
    if group.state in TERMINAL:
        return group
    waiting, finished, failed, size = rows_as_read(rows_text(group), settled)
    return replace(group, waiting=waiting, running=frozenset(), finished=finished, failed=failed, payload_bytes=size)


def run_as_kept(run: RunState) -> RunState:
    """`run` with the counts that are not zero, in the order of the states."""
    return replace(run, ended={state: count for state in GroupState if (count := run.ended.get(state, 0))})


def ordered(states: Collection[GroupState]) -> tuple[GroupState, ...]:
    """`states` in the order of the enum; all of them where none is named."""
    return tuple(state for state in GroupState if not states or state in states)


def forgotten(key: tuple[int, ...], batch: Batch) -> bool:
    """Whether what belongs to (seq, attempt, ...) is written and removed by the same batch, which is nothing at all."""
    seq, attempt = key[:2]
    if seq not in batch.forget_attempts and seq not in batch.forget_payloads:
        return False
    group = batch.groups.get(seq)
    return group is not None and attempt < group.attempt
