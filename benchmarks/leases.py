"""A lease in JSON beside the same lease in binary: bytes, and seconds from the stored arrays to the trainer's values.

What is measured: 8 groups of 16 rollouts of 4,096 tokens (256 of them the prompt), ids below 150,000, logprobs as a
model gives them. Encoding is the service's own, to the chunks it sends; decoding the client's own, to the values a
trainer reads. Nothing is sent and nothing is read from a store. The ratios with a goal are of token data, with texts of
a word a rollout; the second pair has texts of four bytes a token, which both encodings carry alike.

    python -m benchmarks.leases [--rounds 5] [--quick]
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from benchmarks.report import Figure, alternate, at_least, at_most, median, run_alone
from rollout_service.api import binary, wire
from rollout_service.core.group import Group, Lease
from rollout_service.core.model import FinishedRollout, FinishReason, GroupState, Prompt, Turn
from rollout_service.core.records import GroupPayload, GroupScore, RowScore
from rollout_service.orchestrator.views import LeaseAnswer, LeaseStatus
from trainer_client import Lease as ClientLease
from trainer_client.binary import decode_lease

GROUPS, QUICK_GROUPS, ROLLOUTS, TOKENS = 8, 2, 16, 4096
PROMPT_TOKENS = 256
VOCABULARY = 150_000
MEAN_LOGPROB = -0.5
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4096}


def answer(groups: int, rollouts: int, tokens: int, text: str) -> LeaseAnswer:
    """A lease of `groups` groups as the store gives it; `tokens` a rollout, prompt included."""
    payloads = [_group(seq, rollouts, tokens, text) for seq in range(1, groups + 1)]
    lease = Lease(
        lease_id="lease-1",
        max_groups=groups,
        min_groups=groups,
        lease_s=600,
        policy_version=1,
        created_at=0.0,
        expires_at=600.0,
        groups=tuple((payload.group.seq, 1) for payload in payloads),
    )
    return LeaseAnswer(
        status=LeaseStatus.OK, policy_version=1, outstanding=groups, lease=lease, payloads=tuple(payloads)
    )


def _group(seq: int, rollouts: int, tokens: int, text: str) -> GroupPayload:
    draw = random.Random(seq)
    made = {}
    for index in range(rollouts):
        ids = array("i", [draw.randrange(VOCABULARY) for _ in range(tokens)])
        turn = Turn(
            prompt_ids=ids[:PROMPT_TOKENS],
            output_ids=ids[PROMPT_TOKENS:],
            logprobs=array("f", [draw.expovariate(1.0) * MEAN_LOGPROB for _ in ids[PROMPT_TOKENS:]]),
            finish_reason=FinishReason.STOP,
            text=text,
            engine="http://engine",
        )
        made[index] = FinishedRollout(index=index, prompt="prompt", completion=text, turns=(turn,))
    group = Group(
        seq=seq,
        prompt_id=f"p{seq}",
        epoch=0,
        num_generations=rollouts,
        state=GroupState.LEASED,
        version=1,
        waiting=(),
        submitted_at=0.0,
        changed_at=0.0,
    )
    scores = {
        index: RowScore(reward=index / rollouts, rewards={"accuracy": index / rollouts}, advantage=draw.gauss(0, 1))
        for index in made
    }
    return GroupPayload(
        group=group,
        prompt=Prompt(prompt_id=f"p{seq}", text="prompt", num_generations=rollouts),
        rollouts=made,
        score=GroupScore(rows=scores, mean=0.5, std=0.3, zero_variance=False),
    )


def in_json(made: LeaseAnswer) -> bytes:
    return b"".join(wire.lease_pieces(made, SAMPLING))


def in_binary(made: LeaseAnswer) -> bytearray:
    file = binary.lease_file(made, SAMPLING)
    if file is None:
        raise ValueError("texts too long for a safetensors header")
    return bytearray().join(file.pieces)


def from_json(content: bytes) -> ClientLease:
    return msgspec.json.decode(content, type=ClientLease)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One encoding of one lease. Seconds."""

    encode_s: float
    decode_s: float
    bytes: int

    @property
    def both_s(self) -> float:
        return self.encode_s + self.decode_s


Encode = Callable[[LeaseAnswer], bytes | bytearray]
Decode = Callable[..., ClientLease]
WAYS: dict[str, tuple[Encode, Decode]] = {"JSON": (in_json, from_json), "binary": (in_binary, decode_lease)}


def timed(made: LeaseAnswer, way: str) -> Times:
    encode, decode = WAYS[way]
    started = time.perf_counter()
    content = encode(made)
    encoded = time.perf_counter()
    lease = decode(content)
    ended = time.perf_counter()
    if len(lease.groups) != len(made.payloads):
        raise RuntimeError(f"{way}: {len(lease.groups)} groups came back")
    return Times(encode_s=encoded - started, decode_s=ended - encoded, bytes=len(content))


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    groups = QUICK_GROUPS if quick else GROUPS
    return [*_figures(groups, rounds, ""), *_figures(groups, rounds, "_with_texts")]


def _figures(groups: int, rounds: int, suffix: str) -> list[Figure]:
    words = TOKENS - PROMPT_TOKENS if suffix else 1
    made = answer(groups, ROLLOUTS, TOKENS, "word" * words)
    for way in WAYS:
        timed(made, way)  # what the first of all pays (imports) is no part of it
    found = alternate(rounds, {way: partial(timed, made, way) for way in WAYS})
    texts = f"{groups} groups of {ROLLOUTS} x {TOKENS} tokens, " + ("4 bytes of text a token" if suffix else "no texts")
    per_group = {way: 1000 * median(times.both_s for times in runs) / groups for way, runs in found.items()}
    sizes = {way: runs[0].bytes for way, runs in found.items()}
    return [
        Figure(
            key=f"lease_time_ratio_json_binary{suffix}",
            what=f"time of a lease in JSON over binary, encoding and decoding ({texts})",
            value=per_group["JSON"] / per_group["binary"],
            beside=f"binary {per_group['binary']:.3f} ms a group, JSON {per_group['JSON']:.1f} ms",
            goal=None if suffix else at_least(10),
            runs=tuple(a.both_s / b.both_s for a, b in zip(found["JSON"], found["binary"], strict=True)),
        ),
        Figure(
            key=f"lease_bytes_ratio{suffix}",
            what=f"bytes of a lease in binary over JSON ({texts})",
            value=sizes["binary"] / sizes["JSON"],
            beside=f"binary {sizes['binary'] / 1e6:.1f} MB, JSON {sizes['JSON'] / 1e6:.1f} MB",
            goal=None if suffix else at_most(1 / 3),
        ),
    ]


if __name__ == "__main__":
    run_alone(measure, "a lease in JSON beside the same in binary")
