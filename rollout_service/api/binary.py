"""Leased groups as one safetensors file: the content of wire.py's JSON, its token arrays as flat tensors.

Sample i of the lease, counted over all groups in their order, is rows `cu_seqlens[i]:cu_seqlens[i + 1]` of the token
tensors. The metadata key `lease` holds the JSON document of the lease without those three arrays.

What always holds: the file is what safetensors readers accept (data from a multiple of 8 on, no holes, every tensor
aligned to its own item size, header within their limit); its size is known before its first byte; token data is
passed on as it is stored, never touched number by number; no piece of text is encoded in more than one sample's time.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import msgspec

from rollout_service.api import wire
from rollout_service.core.model import TeacherTokens, Turn
from rollout_service.core.sequences import TokenSequence
from rollout_service.orchestrator.views import LeaseAnswer

MEDIA_TYPE = "application/vnd.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""Readers of the format refuse a longer header."""
TENSORS = {
    # Widest items first: each tensor then begins at a multiple of its own item size without padding, which the format
    # does not allow between tensors.
    "cu_seqlens": ("I64", 8),
    "teacher_cu_seqlens": ("I64", 8),
    # float64, for it is the number of the JSON document, which has one precision for both encodings. Rewards stay in
    # the document: an unscored one is null, and no float says that.
    "advantages": ("F64", 8),
    "input_ids": ("I32", 4),
    "old_log_probs": ("F32", 4),
    "teacher_topk_ids": ("I32", 4),
    "teacher_topk_logprobs": ("F32", 4),
    "completion_mask": ("U8", 1),
}
"""Name -> dtype as safetensors spells it, bytes an item; in file order. A teacher's are there where there was one: all
trained tokens of a sample are rows `teacher_cu_seqlens[i]` to `teacher_cu_seqlens[i + 1]` of its two tables."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_BIG_ENDIAN = sys.byteorder == "big"
_WEIGHT = re.compile(r"0(\.[0-9]{0,3})?|1(\.0{0,3})?")

_encode = msgspec.json.Encoder().encode

Row = Turn | TokenSequence
"""One sample's tokens where they lie: a lone turn is its own sequence, so nothing of it needs to be joined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseFile:
    """One file, to be written once."""

    size: int
    """Bytes."""
    pieces: Iterator[bytes | memoryview]
    """All of it, in order; memoryviews are of bytes."""


@dataclass(kw_only=True, slots=True)
class _Flat:
    """What the document's samples leave to the tensors."""

    rows: list[Row] = field(default_factory=list)
    cu_seqlens: array[int] = field(default_factory=lambda: array("q", (0,)))
    advantages: array[float] = field(default_factory=lambda: array("d"))
    teachers: list[TeacherTokens | None] = field(default_factory=list)
    teacher_cu_seqlens: array[int] = field(default_factory=lambda: array("q", (0,)))
    columns: int = 0
    """K of the teachers' tensors: the most any sample has; 0: no teacher."""

    def add(self, row: Row, advantage: float, teacher: TeacherTokens | None) -> None:
        length = len(row.prompt_ids) + len(row.output_ids) if isinstance(row, Turn) else len(row.input_ids)
        self.rows.append(row)
        self.cu_seqlens.append(self.cu_seqlens[-1] + length)
        self.advantages.append(advantage)
        self.teachers.append(teacher)
        rows = 0 if teacher is None else len(teacher.ids) // teacher.columns
        self.teacher_cu_seqlens.append(self.teacher_cu_seqlens[-1] + rows)
        self.columns = max(self.columns, 0 if teacher is None else teacher.columns)


def preferred(accept: Sequence[str]) -> bool:
    """Whether these Accept headers ask for the binary encoding rather than JSON, which is the default.

    The higher weight wins, and the binary counts only where it is named. With equal weights it is JSON, unless that is
    only covered by a wildcard. Ranges that are malformed do not count.
    """
    ranges: dict[str, float] = {}
    for item in ",".join(accept).split(","):
        name, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = next((value for key, _, value in (p.partition("=") for p in parameters) if key.strip() == "q"), "1")
        if _WEIGHT.fullmatch(weight.strip()):
            ranges[name] = float(weight)
    wildcard = ranges.get("application/*", ranges.get("*/*", 0.0))
    binary, json = ranges.get(MEDIA_TYPE, 0.0), ranges.get("application/json", wildcard)
    return binary > json or (binary == json > 0 and "application/json" not in ranges)


def lease_file(answer: LeaseAnswer, sampling: Mapping[str, Any]) -> LeaseFile | None:
    """The answer as a file, for a thread; None where its texts need a longer header than readers accept.

    Encodes all but the tokens, which are passed on while `pieces` is read.
    """
    flat, document, size = _Flat(), [], 0
    for piece in _document(answer, sampling, flat):
        document.append(_encode(piece.decode())[1:-1])  # what stands between the quotes joins up to one JSON string
        size += len(document[-1])
        if size > MAX_HEADER_BYTES:
            return None
    before = b'{"__metadata__":{"lease":"'
    after, data_bytes = _tensor_table(flat)
    after += b" " * (-(len(before) + size + len(after)) % _ALIGNMENT)
    header_bytes = len(before) + size + len(after)
    if header_bytes > MAX_HEADER_BYTES:
        return None
    head = [header_bytes.to_bytes(_LENGTH_BYTES, "little"), before, *document, after]
    return LeaseFile(size=_LENGTH_BYTES + header_bytes + data_bytes, pieces=_pieces(head, flat))


def _document(answer: LeaseAnswer, sampling: Mapping[str, Any], flat: _Flat) -> Iterator[bytes]:
    """The JSON document without the token arrays; its samples' rows go to `flat`, in step."""
    yield wire.lease_head(answer)
    if answer.lease is not None:
        for number, payload in enumerate(answer.payloads):
            yield (b"," if number else b"") + wire.group_head(payload, answer.lease, sampling)
            first = True
            for rollout, score, about in wire.group_rollouts(payload):
                rows: Sequence[Row] = rollout.turns if len(rollout.turns) == 1 else wire.sequences_of(rollout)
                for number, row in enumerate(rows):
                    teacher = score.teacher[number] if number < len(score.teacher) else None
                    flat.add(row, score.advantage, teacher)
                    more = b"" if teacher is None else b',"teacher_id":' + _encode(teacher.teacher_id)
                    yield (b"" if first else b",") + about + more + b"}"
                    first = False
            yield wire.TAIL
    yield wire.TAIL


def _tensor_table(flat: _Flat) -> tuple[bytes, int]:
    """The header from the end of the metadata's string on, and the bytes of all tensors."""
    tokens, rows = flat.cu_seqlens[-1], flat.teacher_cu_seqlens[-1]
    shapes = {
        "cu_seqlens": [len(flat.cu_seqlens)],
        "teacher_cu_seqlens": [len(flat.teacher_cu_seqlens)],
        "advantages": [len(flat.advantages)],
        "teacher_topk_ids": [rows, flat.columns],
        "teacher_topk_logprobs": [rows, flat.columns],
    }
    table, end = {}, 0
    for name, (dtype, item_bytes) in TENSORS.items():
        if name.startswith("teacher_") and not flat.columns:
            continue
        shape = shapes.get(name, [tokens])
        begin, end = end, end + prod(shape) * item_bytes
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return b'"},' + bytes(_encode(table)[1:]), end


def _pieces(head: list[bytes], flat: _Flat) -> Iterator[bytes | memoryview]:
    """The head, then the tensors in the order of `TENSORS`."""
    yield from head
    yield _little_endian(flat.cu_seqlens)
    if flat.columns:
        yield _little_endian(flat.teacher_cu_seqlens)
    yield _little_endian(flat.advantages)
    for row in flat.rows:
        if isinstance(row, Turn):
            yield _little_endian(row.prompt_ids)
            yield _little_endian(row.output_ids)
        else:
            yield _little_endian(row.input_ids)
    for row in flat.rows:
        if isinstance(row, Turn):
            yield bytes(row.logprobs.itemsize * len(row.prompt_ids))
            yield _little_endian(row.logprobs)
        else:
            yield _little_endian(row.old_log_probs)
    for teacher in flat.teachers:
        if teacher is not None:
            yield _little_endian(_widened(teacher.ids, teacher.columns, flat.columns, array("i", (-1,))))
    for teacher in flat.teachers:
        if teacher is not None:
            yield _little_endian(_widened(teacher.logprobs, teacher.columns, flat.columns, array("f", (-inf,))))
    for row in flat.rows:
        if isinstance(row, Turn):
            yield bytes(len(row.prompt_ids))
            yield b"\x01" * len(row.output_ids)
        else:
            yield row.completion_mask


def _widened(values: array[Any], columns: int, wanted: int, filler: array[Any]) -> array[Any]:
    """Rows of `columns` as rows of `wanted`: teachers may differ in their top_k."""
    if columns == wanted:
        return values
    wide = filler * (len(values) // columns * wanted)
    for column in range(columns):
        wide[column::wanted] = values[column::columns]
    return wide


def _little_endian(values: array[int] | array[float]) -> memoryview:
    if _BIG_ENDIAN:
        values = values[:]
        values.byteswap()
    return memoryview(values).cast("B")
