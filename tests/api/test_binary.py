"""Leases as safetensors: the same content as JSON, for readers of every kind, when and only when they are asked for."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings

from rollout_service.api import binary, wire
from rollout_service.api.leases import LeaseResponse
from rollout_service.core.model import FinishedRollout, RolloutJob
from rollout_service.orchestrator.views import LeaseAnswer, LeaseStatus
from tests.api.conftest import Service
from tests.fakes import finished, until
from tests.lease_answers import SAMPLING, answer, answers, even_answer, payload, rollout, row_score, taught, turn
from trainer_client import AsyncRolloutClient, Lease, RolloutClient
from trainer_client.binary import decode_lease

ARRAYS = {"input_ids": "i4", "completion_mask": "u1", "old_log_probs": "f4"}
IN_BINARY = {"accept": binary.MEDIA_TYPE}


def as_json(made: LeaseAnswer) -> bytes:
    return b"".join(wire.lease_pieces(made, SAMPLING))


def as_file(made: LeaseAnswer) -> bytearray:
    file = binary.lease_file(made, SAMPLING)
    assert file is not None
    content = bytearray().join(file.pieces)
    assert len(content) == file.size
    return content


def header(content: bytes | bytearray) -> dict[str, Any]:
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(content[8 : 8 + length])
    assert length % 8 == 0, "tensors begin at a multiple of 8"
    return found


def put_together(content: bytes | bytearray) -> Any:
    """The JSON document again, by readers that know nothing of this project.

    A teacher's tables are as wide as the widest of the file; what is -inf there is null in JSON.
    """
    document = json.loads(header(content)["__metadata__"]["lease"])
    tensors = safetensors.numpy.load(bytes(content))
    samples = [sample for group in document["groups"] for sample in group["samples"]]
    bounds = tensors["cu_seqlens"].tolist()
    assert len(bounds) == len(samples) + 1
    assert tensors["advantages"].tolist() == [sample["advantage"] for sample in samples]
    for sample, begin, end in zip(samples, bounds, bounds[1:], strict=False):
        assert not ARRAYS.keys() & sample.keys()
        sample |= {name: tensors[name][begin:end].tolist() for name in ARRAYS}
    if "teacher_cu_seqlens" in tensors:
        bounds = tensors["teacher_cu_seqlens"].tolist()
        assert len(bounds) == len(samples) + 1
        for sample, begin, end in zip(samples, bounds, bounds[1:], strict=False):
            assert ("teacher_id" in sample) == (begin < end)
            if "teacher_id" in sample:
                sample["teacher_topk_ids"] = tensors["teacher_topk_ids"][begin:end].tolist()
                logprobs = tensors["teacher_topk_logprobs"][begin:end].tolist()
                sample["teacher_topk_logprobs"] = [[None if x == -inf else x for x in row] for row in logprobs]
    return document


def widened(document: Any) -> Any:
    """A JSON document with every teacher's tables filled up to the widest of them, as the file has them."""
    taught = [s for group in document["groups"] for s in group["samples"] if "teacher_id" in s]
    widest = max((len(sample["teacher_topk_ids"][0]) for sample in taught), default=0)
    for sample in taught:
        for name, filler in (("teacher_topk_ids", -1), ("teacher_topk_logprobs", None)):
            sample[name] = [row + [filler] * (widest - len(row)) for row in sample[name]]
    return document


def plain(lease: Lease) -> Any:
    """Every field as built-in values, down to the arrays' members."""
    return json.loads(msgspec.json.encode(lease, enc_hook=lambda values: values.tolist()))


def text_of(document: Any) -> str:
    """What is equal in it is equal: 1 is not 1.0, 0.0 is not -0.0, members in any order."""
    return json.dumps(document, sort_keys=True)


def check_same(made: LeaseAnswer) -> None:
    in_json, file = as_json(made), as_file(made)
    document = widened(json.loads(in_json))
    assert text_of(put_together(file)) == text_of(document)
    decoded = decode_lease(file)
    assert text_of(plain(decoded)) == text_of(plain(msgspec.convert(document, type=Lease)))
    for sample in decoded.samples:
        assert {name: getattr(sample, name).dtype for name in ARRAYS} == ARRAYS
        if sample.teacher_id is not None:
            assert (sample.teacher_topk_ids.dtype, sample.teacher_topk_logprobs.dtype) == ("i4", "f4")


@settings(max_examples=60, deadline=None)
@given(answers())
def test_json_and_binary_carry_the_same_content_field_by_field(made):
    check_same(made)


LONE, PAIR = turn([1], [2]), rollout(1, turn([7], [8]))
EDGES = {
    "empty": answer(status=LeaseStatus.EMPTY),
    "exhausted": answer(status=LeaseStatus.EXHAUSTED),
    "no completion": answer(payload(1, [rollout(0, turn([1, 2], []))])),
    "no token": answer(payload(1, [rollout(0, turn([], []))])),
    "no prompt": answer(payload(1, [rollout(0, turn([], [5]))])),
    "unscored": answer(payload(1, [rollout(0, LONE)], {0: row_score(None, 0.0)})),
    "no score at all": answer(payload(1, [rollout(0, LONE)], {})),
    "rewritten turns": answer(payload(1, [rollout(0, LONE, turn([1, 2, 3], [4]), turn([9], [5])), PAIR])),
    "one token": even_answer(1, 1, 1, prompt_tokens=0),
    "32k tokens": even_answer(1, 2, 32_768),
    "a teacher": answer(payload(1, [rollout(0, turn([1], [5, 6]))], {0: taught((5, 6), 3)})),
    "teachers of several widths": answer(
        payload(1, [rollout(0, turn([1], [5, 6, 7]))], {0: taught((5, 6, 7), 2)}),
        payload(2, [rollout(0, turn([1], [8]))], {0: taught((8,), 5, teacher_id="wide")}),
        payload(3, [rollout(0, turn([1], [9, 9]))], {0: taught((9, 9), 1, teacher_id="narrow")}),
    ),
    "a teacher beside none": answer(
        payload(1, [rollout(0, LONE)]), payload(2, [rollout(0, turn([1], [8]))], {0: taught((8,), 2)})
    ),
    "a teacher of rewritten turns": answer(
        payload(1, [rollout(0, LONE, turn([9], [5, 6]), fork_threshold=0)], {0: taught((2,), 2, (5, 6))})
    ),
}


@pytest.mark.parametrize("made", EDGES.values(), ids=EDGES)
def test_edge_sizes_carry_the_same_content_too(made):
    check_same(made)


def test_the_file_is_laid_out_as_documented_and_torch_reads_it():
    made = answer(payload(1, [rollout(0, turn([1, 2], [3])), rollout(2, turn([4], [5, 6, 7]))]), payload(2, []))
    content = as_file(made)
    found = header(content)
    assert list(found) == ["__metadata__", "cu_seqlens", "advantages", "input_ids", "old_log_probs", "completion_mask"]
    assert list(found["__metadata__"]) == ["lease"]
    tensors = safetensors.torch.load(bytes(content))
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "cu_seqlens": ((3,), torch.int64),
        "advantages": ((2,), torch.float64),
        "input_ids": ((7,), torch.int32),
        "old_log_probs": ((7,), torch.float32),
        "completion_mask": ((7,), torch.uint8),
    }
    assert tensors["cu_seqlens"].tolist() == [0, 3, 7]
    assert tensors["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tensors["completion_mask"].tolist() == [0, 0, 1, 0, 1, 1, 1]
    assert tensors["old_log_probs"].tolist() == [0.0, 0.0, -0.375, 0.0, -0.625, -0.75, -0.875]


def test_an_empty_answer_is_a_file_of_empty_tensors():
    tensors = safetensors.torch.load(bytes(as_file(answer())))
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    assert lengths.pop("cu_seqlens") == 1
    assert set(lengths.values()) == {0}


def test_a_teachers_tables_are_laid_out_as_documented():
    one = payload(1, [rollout(0, turn([1, 2], [5, 6]))], {0: taught((5, 6), 2)})
    other = payload(2, [rollout(0, turn([3], [8]))], {0: taught((8,), 3, teacher_id="wide")})
    content = as_file(answer(one, other))
    assert list(header(content)) == [
        "__metadata__", "cu_seqlens", "teacher_cu_seqlens", "advantages", "input_ids", "old_log_probs",
        "teacher_topk_ids", "teacher_topk_logprobs", "completion_mask",
    ]  # fmt: skip
    tensors = safetensors.torch.load(bytes(content))
    assert tensors["teacher_cu_seqlens"].tolist() == [0, 2, 3]
    assert tensors["teacher_topk_ids"].tolist() == [[5, 105, -1], [6, 106, -1], [8, 108, 208]]
    assert tensors["teacher_topk_logprobs"].tolist() == [
        [-0.0, -0.125, -inf],
        [-0.0, -0.125, -inf],
        [-0.0, -0.125, -0.25],
    ]
    assert (tensors["teacher_topk_ids"].dtype, tensors["teacher_topk_logprobs"].dtype) == (torch.int32, torch.float32)


# negotiation


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ((), False),
        (("*/*",), False),
        (("",), False),
        (("application/json",), False),
        (("application/*",), False),
        (("text/html, */*;q=0.8",), False),
        (("application/vnd.safetensors",), True),
        (("Application/VND.Safetensors ; q=0.2",), True),
        (("application/vnd.safetensors, */*;q=0.1",), True),
        (("application/vnd.safetensors, */*",), True),
        (("application/vnd.safetensors, application/json;q=0.5",), True),
        (("application/json;q=0.5", "application/vnd.safetensors"), True),
        (("application/vnd.safetensors, application/json",), False),
        (("application/vnd.safetensors;q=0.4, application/json;q=0.5",), False),
        (("application/vnd.safetensors;q=0.4, */*;q=0.5",), False),
        (("application/vnd.safetensors;q=0",), False),
        (("application/vnd.safetensors;q=0, */*;q=0",), False),
        (("application/vnd.safetensors;q=nan",), False),
        (("application/vnd.safetensors;q=2",), False),
        (("application/vnd.safetensors;v=1;q=1.000",), True),
    ],
)
def test_accept_decides_and_json_is_the_default(accept, expected):
    assert binary.preferred(accept) is expected


async def test_a_lease_over_http_comes_as_asked_for_with_its_length(live: Service):
    live.runner.answer = lambda job: finished(job.index, text='"quoted" \\ ü\u0000🙂')
    await live.submit("a", "b")
    body = {"max_groups": 8, "min_groups": 2, "wait_s": 10, "request_id": "r"}
    in_json = await live.http.post("/leases", json=body)
    assert in_json.headers["content-type"] == "application/json"
    file = await live.http.post("/leases", json=body, headers=IN_BINARY)
    assert file.headers["content-type"] == binary.MEDIA_TYPE
    assert int(file.headers["content-length"]) == len(file.content)
    assert text_of(put_together(file.content)) == text_of(in_json.json())
    assert len(in_json.json()["groups"]) == 2


async def test_empty_and_exhausted_come_as_asked_for_and_errors_stay_problems(service: Service):
    body = {"max_groups": 8, "wait_s": 0}
    empty = await service.http.post("/leases", json=body, headers=IN_BINARY)
    assert empty.headers["content-type"] == binary.MEDIA_TYPE
    assert decode_lease(empty.content).status == "empty"
    await service.post("/prompts", {"prompts": [], "final": True})
    assert (
        decode_lease((await service.http.post("/leases", json=body, headers=IN_BINARY)).content).status == "exhausted"
    )
    for wrong, status in (({"max_groups": 0}, 422), ({"max_groups": 8, "min_groups": 9}, 422), ([], 400)):
        refused = await service.http.post("/leases", json=wrong, headers=IN_BINARY)
        assert refused.status_code == status
        assert refused.headers["content-type"] == "application/problem+json"


async def test_texts_that_pass_the_readers_limit_are_answered_in_json(service: Service, monkeypatch):
    service.runner.answer = lambda job: finished(job.index, text="x" * 1000)
    await service.submit("a")
    monkeypatch.setattr(binary, "MAX_HEADER_BYTES", 3000)
    got = await service.http.post("/leases", json={"max_groups": 1, "wait_s": 10}, headers=IN_BINARY)
    assert got.headers["content-type"] == "application/json"
    assert got.json()["status"] == "ok"


def test_openapi_declares_both_encodings(service: Service):
    content = service.app.openapi()["paths"]["/leases"]["post"]["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/LeaseAnswer"}
    assert content[binary.MEDIA_TYPE]["schema"]["format"] == "binary"


# delivery


def long_rollout(job: RolloutJob) -> FinishedRollout:
    tokens = array("i", range(500_000))
    return rollout(job.index, turn([1], tokens, logprobs=array("f", bytes(4 * len(tokens)))))


async def test_a_caller_that_hangs_up_in_the_middle_of_the_file_leaves_the_groups_free(live: Service):
    live.runner.answer = long_rollout
    await live.submit("a")
    await until(lambda: live.door.status().counts.groups["ready"] == 1)
    body = b'{"max_groups": 1, "wait_s": 10}'
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port, limit=2**16)
    head = b"POST /leases HTTP/1.1\r\nhost: x\r\naccept: application/vnd.safetensors\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    answered = await reader.readuntil(b"\r\n\r\n")
    assert b"content-length: 18" in answered, "18 MB, more than the sockets between can hold"
    assert live.door.status().leases == 1
    writer.transport.abort()
    await until(lambda: live.door.status().leases == 0, "the lease is over")
    assert live.door.status().counts.groups["ready"] == 1


async def test_both_clients_get_the_same_lease_in_both_encodings(live: Service):
    live.runner.answer = long_rollout
    url = f"http://127.0.0.1:{live.port}"
    await live.submit("a")

    def ask(in_binary: bool) -> Lease:
        with RolloutClient(url, binary=in_binary) as client:
            return client.lease(max_groups=1, request_id="r")

    leases = [await asyncio.to_thread(ask, in_binary) for in_binary in (True, False)]
    for in_binary in (True, False):
        async with AsyncRolloutClient(url, binary=in_binary) as client:
            leases.append(await client.lease(max_groups=1, request_id="r"))
    assert [type(lease.samples[0].input_ids) for lease in leases] == [np.ndarray, list] * 2
    first, *others = leases
    for lease in others:
        assert lease.lease_id == first.lease_id
        for sample, reference in zip(lease.samples, first.samples, strict=True):
            assert all(np.array_equal(getattr(sample, name), getattr(reference, name)) for name in ARRAYS)


@pytest.mark.parametrize("in_binary", [False, True], ids=["json", "binary"])
async def test_a_big_lease_is_written_off_the_event_loop(in_binary):
    """Whether it is, by the loop turning while it is written; how long it stood still is printed: machines differ."""
    made = even_answer(64, 16, 2048)
    context = Service().context
    sent, gaps = 0, [0.0]

    async def send(message: Any) -> None:
        nonlocal sent
        sent += len(message.get("body", b""))
        await asyncio.sleep(0)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last - 0.001)
            last = now

    watcher = asyncio.create_task(watch())
    started = time.perf_counter()
    await LeaseResponse(context, made, in_binary=in_binary)({"type": "http"}, receive, send)
    took = time.perf_counter() - started
    watcher.cancel()
    print(
        f"{'binary' if in_binary else 'JSON'}: {sent / 1e6:.1f} MB in {took:.3f} s, "
        f"loop at most {1000 * max(gaps):.1f} ms late, {len(gaps)} turns"
    )
    assert sent > 64 * 16 * 2048 * 9
    assert len(gaps) > 5
