"""What each completion will be, before it is decoded: its tokens, its length and the work it takes. Pure.

Always holds: the same settings and the same key give the same `Plan`; different keys give different tokens (two
walks coincide once in 2**28). Keys are made of what names a completion (request id,
prompt and index), never of time or order.
"""

from __future__ import annotations

import hashlib
import math
import struct
from statistics import NormalDist
from typing import NamedTuple

from .content import STARTS, Content, seeded_ring
from .settings import Lengths, SimulatorSettings

_NORMAL = NormalDist()
_DRAWS = struct.Struct("<IIQQ")


class Plan(NamedTuple):
    """One completion as it will be if nobody stops it."""

    content: Content
    finish_reason: str
    """`stop` (the last token is <eos>) or `length` (cut at the limit)."""
    work: float
    """Tokens to decode, or seconds where the latency is fixed."""


def seeded_key(seed: int, *, request_seed: int, prompt_ids: list[int], index: int) -> str:
    """Key of a completion whose request carries a seed: the same prompt and seed give the same tokens again."""
    prompt = hashlib.blake2b(repr(prompt_ids).encode(), digest_size=16).hexdigest()
    return f"{seed}::{request_seed}:{prompt}:{index}"


class Decoder:
    """Plans completions from the seed."""

    def __init__(self, settings: SimulatorSettings) -> None:
        self._settings = settings
        self._ring = seeded_ring(settings.seed)
        sigma = settings.sigma
        self._log_mean = math.log(settings.mean_tokens) - sigma * sigma / 2

    def plan(self, key: str, limit: int, min_tokens: int = 0, ignore_eos: bool = False) -> Plan:
        """The completion of `key`, of at most `limit` (>= 1) tokens."""
        draws = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=_DRAWS.size).digest()
        first, second, length_draw, latency_draw = _DRAWS.unpack(draws)
        wanted = limit + 1 if ignore_eos else max(1, min_tokens, self._wanted((length_draw + 0.5) / 2**64))
        length = min(wanted, limit)
        ends = wanted <= limit
        content = Content(self._ring, first % STARTS, second % STARTS, length // 2, length, ends)
        return Plan(content, "stop" if ends else "length", self.work(length, latency_draw / 2**64))

    def work(self, tokens: int, draw: float = 0.5) -> float:
        """Work of `tokens`; `draw` in [0, 1) places the latency within its jitter."""
        settings = self._settings
        if settings.latency is None:
            return float(tokens)
        return settings.latency * (1 + settings.jitter * (2 * draw - 1))

    def _wanted(self, draw: float) -> int:
        settings = self._settings
        if settings.lengths is Lengths.FIXED:
            return settings.mean_tokens
        if settings.lengths is Lengths.UNIFORM:
            return 1 + int(draw * (2 * settings.mean_tokens - 1))
        return round(math.exp(self._log_mean + settings.sigma * _NORMAL.inv_cdf(min(draw, 1 - 2**-53))))
