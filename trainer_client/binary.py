"""A lease out of one safetensors file, its token arrays as views into the received bytes.

What always holds: a decoded lease has the content that JSON would have had; `input_ids` (int32), `completion_mask`
(uint8) and `old_log_probs` (float32) of its samples are numpy arrays over `content` itself, writable where that is a
bytearray, and keep it alive; a file that contradicts itself is refused whole. numpy is imported when the first file
arrives, not with this module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from trainer_client.errors import UnexpectedAnswer
from trainer_client.types import Lease

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ACCEPT", "MEDIA_TYPE", "decode_lease"]

MEDIA_TYPE = "application/vnd.safetensors"
ACCEPT = f"{MEDIA_TYPE}, application/json;q=0.5"
"""A service that knows no binary leases answers in JSON."""
_LENGTH_BYTES = 8
"""The file begins with the length of its header, little-endian."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """From the end of the header on."""


class _Metadata(msgspec.Struct):
    lease: str
    """The JSON document of the lease without the token arrays of its samples."""


class _Header(msgspec.Struct):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    cu_seqlens: _Tensor
    input_ids: _Tensor
    completion_mask: _Tensor
    old_log_probs: _Tensor
    teacher_cu_seqlens: _Tensor | None = None
    teacher_topk_ids: _Tensor | None = None
    teacher_topk_logprobs: _Tensor | None = None


def decode_lease(content: bytes | bytearray) -> Lease:
    """The lease in `content`, without a copy of its tokens. Raises UnexpectedAnswer for what is no such file."""
    try:
        return _decode(content)
    except (ValueError, KeyError, TypeError) as error:  # msgspec's errors and UnicodeDecodeError are ValueErrors
        raise UnexpectedAnswer(f"this is no lease as a safetensors file: {error}: {bytes(content[:80])!r}") from error


def _decode(content: bytes | bytearray) -> Lease:
    import numpy as np

    start = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if len(content) < max(start, _LENGTH_BYTES):
        raise ValueError(f"{len(content)} bytes are less than its header")
    header = msgspec.json.decode(memoryview(content)[_LENGTH_BYTES:start], type=_Header)
    data = np.frombuffer(content, np.uint8)[start:]
    bounds = _array(data, header.cu_seqlens, "I64", "<i8")
    ids = _array(data, header.input_ids, "I32", "<i4")
    mask = _array(data, header.completion_mask, "U8", "u1")
    logprobs = _array(data, header.old_log_probs, "F32", "<f4")
    if not len(ids) == len(mask) == len(logprobs):
        raise ValueError("its token arrays differ in length")
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(ids) or (bounds[1:] < bounds[:-1]).any():
        raise ValueError("cu_seqlens does not rise from 0 to the number of tokens")

    document = msgspec.json.decode(header.metadata.lease, type=dict[str, Any])
    for group in document["groups"]:
        for sample in group["samples"]:
            # Placeholders, so that everything else is checked as in the JSON encoding.
            sample["input_ids"] = sample["completion_mask"] = sample["old_log_probs"] = ()
    lease = msgspec.convert(document, Lease)
    places = bounds.tolist()
    samples = lease.samples
    if len(samples) != len(places) - 1:
        raise ValueError(f"cu_seqlens is of {len(places) - 1} samples, the lease of {len(samples)}")
    for sample, begin, end in zip(samples, places, places[1:], strict=False):
        sample.input_ids = ids[begin:end]
        sample.completion_mask = mask[begin:end]
        sample.old_log_probs = logprobs[begin:end]
    _add_teachers(lease, header, data)
    return lease


def _add_teachers(lease: Lease, header: _Header, data: np.ndarray[Any, Any]) -> None:
    if header.teacher_cu_seqlens is None or header.teacher_topk_ids is None or header.teacher_topk_logprobs is None:
        return
    bounds = _array(data, header.teacher_cu_seqlens, "I64", "<i8")
    ids = _array(data, header.teacher_topk_ids, "I32", "<i4", 2)
    logprobs = _array(data, header.teacher_topk_logprobs, "F32", "<f4", 2)
    samples = lease.samples
    if len(bounds) != len(samples) + 1 or bounds[0] != 0 or bounds[-1] != len(ids) or ids.shape != logprobs.shape:
        raise ValueError("teacher_cu_seqlens does not fit the teacher's tables")
    if (bounds[1:] < bounds[:-1]).any():
        raise ValueError("teacher_cu_seqlens falls")
    places = bounds.tolist()
    for sample, begin, end in zip(samples, places, places[1:], strict=False):
        if sample.teacher_id is not None:
            sample.teacher_topk_ids = ids[begin:end]
            sample.teacher_topk_logprobs = logprobs[begin:end]


def _array(data: np.ndarray[Any, Any], tensor: _Tensor, dtype: str, numpy_dtype: str, dimensions: int = 1) -> Any:
    """A tensor as a view into `data`."""
    begin, end = tensor.data_offsets
    if tensor.dtype != dtype or not 0 <= begin <= end <= len(data):
        raise ValueError(
            f"a tensor {tensor.dtype} at {begin}:{end} of {len(data)} bytes is not the {dtype} it should be"
        )
    values = data[begin:end].view(numpy_dtype)
    if (
        len(tensor.shape) != dimensions
        or any(size < 0 for size in tensor.shape)
        or math.prod(tensor.shape) != len(values)
    ):
        raise ValueError(f"a tensor of shape {tensor.shape} has {len(values)} values")
    return values if dimensions == 1 else values.reshape(tensor.shape)
