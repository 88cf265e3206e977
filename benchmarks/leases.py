"""A lease in JSON beside the same lease in binary: bytes, and seconds from the stored arrays to the trainer's values.

What is measured: 8 groups of 16 rollouts of 4,096 tokens (256 of them the prompt), ids below 150,000, logprobs as a
model gives them. Encoding is the service's own, to the chunks it sends; decoding the client's own. Runs alternate and
the best of each counts, so that what else the machine does counts least. The ratios are of token data, with texts of a
word a rollout; a second pair of lines has texts of four bytes a token, which both encodings carry alike. Adds its
figures to bench.json.

    python -m benchmarks.leases [--rounds 5] [--groups 8] [--rollouts 16] [--tokens 4096]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollout_service.api import binary, wire
from rollout_service.core.group import Group, Lease
from rollout_service.core.model import FinishedRollout, FinishReason, GroupState, Prompt, Turn
from rollout_service.core.records import GroupPayload, GroupScore, RowScore
from rollout_service.orchestrator.views import LeaseAnswer, LeaseStatus
from trainer_client import Lease as ClientLease
from trainer_client.binary import decode_lease

ROOT = Path(__file__).resolve().parents[1]
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


class Best:
    """The best times of one encoding, seconds."""

    def __init__(
        self, name: str, encode: Callable[[LeaseAnswer], bytes | bytearray], decode: Callable[..., ClientLease]
    ) -> None:
        self.name, self._encode, self._decode = name, encode, decode
        self.encode_s = self.decode_s = self.both_s = float("inf")
        self.bytes = 0

    def run(self, made: LeaseAnswer) -> None:
        started = time.perf_counter()
        content = self._encode(made)
        encoded = time.perf_counter()
        lease = self._decode(content)
        ended = time.perf_counter()
        if len(lease.groups) != len(made.payloads):
            raise RuntimeError(f"{self.name}: {len(lease.groups)} groups came back")
        self.bytes = len(content)
        self.encode_s = min(self.encode_s, encoded - started)
        self.decode_s = min(self.decode_s, ended - encoded)
        self.both_s = min(self.both_s, ended - started)


def measure(made: LeaseAnswer, rounds: int) -> tuple[Best, Best]:
    pair = Best("JSON", in_json, from_json), Best("binary", in_binary, decode_lease)
    for _ in range(rounds):
        for encoding in pair:
            encoding.run(made)
    return pair


def main() -> None:
    arguments = argparse.ArgumentParser(description="a lease in JSON beside the same in binary")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--groups", type=int, default=8)
    arguments.add_argument("--rollouts", type=int, default=16)
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--output", type=Path, default=ROOT / "bench.json")
    given = arguments.parse_args()
    if given.tokens <= PROMPT_TOKENS:
        arguments.error(f"--tokens: more than the {PROMPT_TOKENS} of the prompt")
    result: dict[str, float] = {}
    print(f"{given.groups} groups of {given.rollouts} rollouts of {given.tokens} tokens; best of {given.rounds}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"{'lease':<24}{'MB':>8}{'encode ms':>12}{'decode ms':>12}{'together':>12}{'a group':>12}")
    for suffix, words in (("", 1), ("_with_texts", given.tokens - PROMPT_TOKENS)):
        made = answer(given.groups, given.rollouts, given.tokens, "word" * words)
        pair = measure(made, given.rounds)
        for best in pair:
            name = best.name + suffix.replace("_", " ")
            times = (best.encode_s, best.decode_s, best.both_s, best.both_s / given.groups)
            print(f"{name:<24}{best.bytes / 1e6:>8.2f}" + "".join(f"{1000 * seconds:>12.2f}" for seconds in times))
        result[f"lease_time_ratio_json_binary{suffix}"] = pair[0].both_s / pair[1].both_s
        result[f"lease_bytes_ratio{suffix}"] = pair[1].bytes / pair[0].bytes
    known = json.loads(given.output.read_text()) if given.output.exists() else {}
    given.output.write_text(json.dumps(known | result, indent=2) + "\n")
    print()
    for key, value in result.items():
        print(f"{key} = {value:.3f}")


if __name__ == "__main__":
    main()
