"""How the service and its reward workers talk: frames of a 4-byte little-endian length and msgpack; never pickle.

The service sends one `Setup`, then calls, each after the answer to the one before. The worker answers `Ready` or
`Refused`, then one `Outcome` a call. A call's frame is the number of the function and the group's fields
(`GroupFields.packed`), so that fields are encoded once for all functions.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from rollout_service.rewards.outcome import Outcome

LENGTH: Final = struct.Struct("<I")
_CALL: Final = struct.Struct("<IH")
_FUNCTION: Final = struct.Struct("<H")


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """What a worker imports."""

    path: list[str]
    """Goes in front of sys.path."""
    functions: list[tuple[str, str]]
    """Name of the reward and `module:function`; calls name them by their place here."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Everything is imported."""

    is_async: list[bool]
    """For each function: it is to be awaited in the service's own loop."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Something could not be imported; the worker ends."""

    error: str
    """One line: what, and where."""


FromWorker = Ready | Refused | Outcome
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)
_SETUP: Final = msgspec.msgpack.Decoder(Setup)


def frame(message: Setup | FromWorker) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def call_frame(function: int, packed: bytes) -> bytes:
    """A call of function number `function` on packed fields."""
    return _CALL.pack(len(packed) + _FUNCTION.size, function) + packed


def read_call(body: bytes) -> tuple[int, memoryview]:
    """The number of the function and the packed fields."""
    return _FUNCTION.unpack_from(body)[0], memoryview(body)[_FUNCTION.size :]


def read_setup(body: bytes) -> Setup:
    return _SETUP.decode(body)


def read_from_worker(body: bytes | bytearray) -> FromWorker:
    """Raises msgspec.MsgspecError for anything that is none of the three."""
    message: FromWorker = _FROM_WORKER.decode(body)
    return message
