"""What a reward reads of a group: `prompts`, `completions`, `completion_ids`, and every column once a survivor.

Row i of everything is survivor i. A reader gets objects of its own, never those of the job or of another row: user code
may change them. A column with one of the three names would hide the field, so it is left out (the scorer warns once).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_service.core.model import FinishedRollout, ScoreJob

FIELDS = frozenset({"prompts", "completions", "completion_ids"})
_BIG_INT = 1
"""msgpack extension: an integer beyond 64 bits, in its shortest signed big-endian bytes."""


class _Packed(msgspec.Struct, array_like=True):
    """The group on the wire; token ids are int32 in the machine's order (both ends are this machine)."""

    n: int
    prompts: list[msgspec.Raw]
    """One for all rows, or one a row."""
    completions: list[msgspec.Raw]
    completion_ids: list[bytes]
    columns: dict[str, msgspec.Raw]
    """One value each, the same for every row."""


class GroupFields:
    """The fields of one job, encoded at most once however many rewards read them."""

    def __init__(self, job: ScoreJob) -> None:
        self._job = job
        self._packed: bytes | None = None
        self._json: bytes | None = None
        self.n = len(job.rollouts)

    def packed(self) -> bytes:
        """msgpack, for `unpack`. Raises TypeError, UnicodeEncodeError and the like for values that JSON has not."""
        if self._packed is None:
            rollouts = self._job.rollouts
            first = rollouts[0].prompt
            prompts = [first] if all(r.prompt == first for r in rollouts) else [r.prompt for r in rollouts]
            completions = [rollout.completion for rollout in rollouts]
            ids = [_ids(rollout).tobytes() for rollout in rollouts]
            fields = (self.n, prompts, completions, ids, self._columns())
            try:
                self._packed = _ENCODER.encode(fields)
            except OverflowError:
                self._packed = _ENCODER.encode(_with_big_ints(fields))
        return self._packed

    def json(self) -> bytes:
        """One JSON object of all fields, for webhooks."""
        if self._json is None:
            fields: dict[str, Any] = {name: [value] * self.n for name, value in self._columns().items()}
            fields["prompts"] = [rollout.prompt for rollout in self._job.rollouts]
            fields["completions"] = [rollout.completion for rollout in self._job.rollouts]
            fields["completion_ids"] = [_ids(rollout).tolist() for rollout in self._job.rollouts]
            self._json = msgspec.json.encode(fields, enc_hook=_plain)
        return self._json

    def _columns(self) -> dict[str, Any]:
        return {name: value for name, value in self._job.prompt.columns.items() if name not in FIELDS}


def unpack(packed: bytes | memoryview, accepts: frozenset[str] | None) -> tuple[int, dict[str, Any]]:
    """The number of survivors, and the keyword arguments for a function that accepts these names (None: all)."""
    group = _DECODER.decode(packed)
    fields: dict[str, Any] = {}
    for name, value in group.columns.items():
        if accepts is None or name in accepts:
            fields[name] = _repeated(value, group.n)
    if accepts is None or "prompts" in accepts:
        one = len(group.prompts) == 1
        fields["prompts"] = _repeated(group.prompts[0], group.n) if one else [_value(p) for p in group.prompts]
    if accepts is None or "completions" in accepts:
        fields["completions"] = [_value(completion) for completion in group.completions]
    if accepts is None or "completion_ids" in accepts:
        fields["completion_ids"] = [memoryview(ids).cast("i").tolist() for ids in group.completion_ids]
    return group.n, fields


def _ids(rollout: FinishedRollout) -> array[int]:
    """Every id the policy generated, turn after turn."""
    ids = rollout.turns[0].output_ids
    for turn in rollout.turns[1:]:
        ids = ids + turn.output_ids  # not +=: the array is the rollout's
    return ids


def _repeated(raw: msgspec.Raw, n: int) -> list[Any]:
    value = _value(raw)
    if isinstance(value, list | dict):  # rows must not share what user code can change
        return [value] + [_value(raw) for _ in range(n - 1)]
    return [value] * n


def _plain(value: object) -> object:
    """For msgspec, of what it does not know: mappings and sequences of other kinds than dict and list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be given to rewards")


def _with_big_ints(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return msgspec.msgpack.Ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, Mapping):
        return {key: _with_big_ints(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_with_big_ints(item) for item in value]
    return value


def _extension(code: int, data: memoryview) -> int:
    if code != _BIG_INT:
        raise ValueError(f"unknown msgpack extension {code}")
    return int.from_bytes(data, "big", signed=True)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(_Packed)
_VALUES = msgspec.msgpack.Decoder(ext_hook=_extension)


def _value(raw: msgspec.Raw) -> Any:
    return _VALUES.decode(raw)
