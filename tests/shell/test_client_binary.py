"""Leases as safetensors at the client: any writer's files, views instead of copies, nothing believed that cannot be."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client_script import ScriptedService, group, sample
from trainer_client import Lease, RolloutClient, UnexpectedAnswer
from trainer_client.binary import ACCEPT, MEDIA_TYPE, decode_lease

DTYPES = {"input_ids": np.int32, "completion_mask": np.uint8, "old_log_probs": np.float32}
SAMPLES = ([sample(0), sample(1, prompt=1, completion=9)], [sample(2, prompt=4, completion=0, reward=None)])


def document(*samples_of: list[dict[str, Any]]) -> dict[str, Any]:
    groups = [group(f"g{i}", samples=rows) for i, rows in enumerate(samples_of)]
    return {
        "lease_id": "l1", "expires_at": "later", "status": "ok" if groups else "empty", "policy_version": 3,
        "outstanding": 4, "groups": groups,
    }  # fmt: skip


def as_file(lease: dict[str, Any], **tensors: Any) -> bytes:
    """Written by the safetensors library, which orders tensors as it likes; `tensors` replace those of the lease."""
    bare = json.loads(json.dumps(lease))
    rows = [row for group in bare["groups"] for row in group["samples"]]
    taken = {name: [row.pop(name) for row in rows] for name in DTYPES}
    lengths = [len(values) for values in taken["input_ids"]]
    flat = {name: np.array([v for values in taken[name] for v in values], dtype) for name, dtype in DTYPES.items()}
    flat |= {"cu_seqlens": np.cumsum([0, *lengths], dtype=np.int64), "a_later_tensor": np.zeros(3)}
    kept = {name: tensor for name, tensor in (flat | tensors).items() if tensor is not None}
    metadata = {"lease": json.dumps(bare), "a_later_key": "x"}
    return bytes(safetensors.numpy.save(kept, metadata=metadata))


def client_of(content: bytes, content_type: str, seen: list[httpx.Request], **options: Any) -> RolloutClient:
    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, content=content, headers={"content-type": content_type})

    return RolloutClient("http://service", transport=httpx.MockTransport(answer), **options)


def test_leases_are_asked_for_in_binary_and_their_arrays_can_be_written_to():
    seen: list[httpx.Request] = []
    with client_of(as_file(document(*SAMPLES)), f"{MEDIA_TYPE}; v=1", seen) as client:
        lease = client.lease()
        client.ack(lease)
    assert [request.headers["accept"] for request in seen] == [ACCEPT, "*/*"]
    assert (lease.lease_id, lease.policy_version, lease.outstanding) == ("l1", 3, 4)
    for got, made in zip(lease.samples, [row for rows in SAMPLES for row in rows], strict=True):
        for name, dtype in DTYPES.items():
            values = getattr(got, name)
            assert values.dtype == dtype
            assert values.tolist() == made[name]
            assert values.flags.writeable, "torch.from_numpy warns of those that are not"
        assert (got.reward, got.advantage, got.metrics) == (made["reward"], made["advantage"], made["metrics"])
    assert [group.columns for group in lease.groups] == [{"answer": 42}] * 2


def with_teachers() -> tuple[bytes, bytes]:
    """A lease of one taught sample, one without a teacher and one with a narrower one: as a file, and as JSON."""
    lease = copy.deepcopy(document(*SAMPLES))
    first, _, third = [row for group in lease["groups"] for row in group["samples"]]
    first |= {"teacher_id": "wide"}
    third |= {"teacher_id": "narrow"}
    ids = np.array([[5, 6, 7], [8, 9, 10], [11, -1, -1]], np.int32)
    logprobs = np.array([[0, -1, -2], [-0.5, -1, -3], [-1.5, -np.inf, -np.inf]], np.float32)
    tables = {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
    file = as_file(lease, **tables, teacher_cu_seqlens=np.array([0, 2, 2, 3], np.int64))
    first |= {"teacher_topk_ids": [[5, 6, 7], [8, 9, 10]], "teacher_topk_logprobs": [[0, -1, -2], [-0.5, -1, -3]]}
    third |= {"teacher_topk_ids": [[11, -1]], "teacher_topk_logprobs": [[-1.5, None]]}
    return file, json.dumps(lease).encode()


def test_a_teachers_tables_are_views_of_their_samples_rows():
    content = bytearray(with_teachers()[0])
    first, second, third = decode_lease(content).samples
    assert [sample.teacher_id for sample in (first, second, third)] == ["wide", None, "narrow"]
    assert first.teacher_topk_ids.tolist() == [[5, 6, 7], [8, 9, 10]]
    assert first.teacher_topk_logprobs.tolist() == [[0, -1, -2], [-0.5, -1, -3]]
    assert (second.teacher_topk_ids, second.teacher_topk_logprobs) == (None, None)
    assert third.teacher_topk_ids.tolist() == [[11, -1, -1]]
    assert third.teacher_topk_logprobs.tolist() == [[-1.5, -np.inf, -np.inf]]
    whole = np.frombuffer(content, np.uint8)
    for row in (first, third):
        for table, dtype in ((row.teacher_topk_ids, np.int32), (row.teacher_topk_logprobs, np.float32)):
            assert table.dtype == dtype
            assert table.flags.writeable
            assert np.shares_memory(table, whole)


def test_a_teachers_tables_come_as_json_with_none_for_minus_infinity_and_each_in_its_own_width():
    with client_of(with_teachers()[1], "application/json", []) as client:
        first, second, third = client.lease().samples
    assert (first.teacher_id, first.teacher_topk_ids) == ("wide", [[5, 6, 7], [8, 9, 10]])
    assert second.teacher_id is None
    assert (third.teacher_topk_ids, third.teacher_topk_logprobs) == ([[11, -1]], [[-1.5, None]])


def test_json_is_asked_for_with_binary_off_and_taken_from_services_that_know_nothing_else():
    seen: list[httpx.Request] = []
    content = json.dumps(document(*SAMPLES)).encode()
    for options in ({"binary": False}, {}):
        with client_of(content, "application/json", seen, **options) as client:
            assert client.lease().samples[0].input_ids == SAMPLES[0][0]["input_ids"]
    assert [request.headers["accept"] for request in seen] == ["*/*", ACCEPT]


def test_an_empty_lease_has_no_groups():
    lease = decode_lease(as_file(document()))
    assert (lease.status, lease.groups) == ("empty", [])


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_arrays_are_views_into_the_received_bytes(kind):
    content = kind(as_file(document(*SAMPLES)))
    lease = decode_lease(content)
    whole = np.frombuffer(content, np.uint8)
    for row in lease.samples:
        for name in DTYPES:
            assert np.shares_memory(getattr(row, name), whole)
            assert getattr(row, name).flags.writeable is (kind is bytearray)


def test_tensors_are_the_same_from_both_encodings():
    torch = pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")
    from trainer_client.tensors import to_tensors

    service = ScriptedService(ready=document(*SAMPLES)["groups"]).start()
    try:
        with RolloutClient(service.url) as client:
            in_json = client.lease(wait_s=0)
    finally:
        service.stop()
    assert isinstance(in_json.samples[0].input_ids, list)
    in_binary = decode_lease(bytearray(as_file(document(*SAMPLES))))
    first, second = (to_tensors(lease.groups, 9, padding_side="left") for lease in (in_json, in_binary))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name])
    assert torch.from_numpy(in_binary.samples[0].input_ids).tolist() == SAMPLES[0][0]["input_ids"]


# what is no lease


LEASE = document(*SAMPLES)
TOKENS = 19


TABLES = {
    "teacher_cu_seqlens": np.array([0, 1, 1, 3], np.int64),
    "teacher_topk_ids": np.zeros((3, 2), np.int32),
    "teacher_topk_logprobs": np.zeros((3, 2), np.float32),
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"teacher_topk_ids": np.zeros((3, 2), np.int64)},
        {"teacher_topk_ids": np.zeros((3, 3), np.int32)},
        {"teacher_topk_ids": np.zeros(6, np.int32)},
        {"teacher_topk_logprobs": np.zeros((2, 2), np.float32)},
        {"teacher_cu_seqlens": np.array([0, 1, 3], np.int64)},
        {"teacher_cu_seqlens": np.array([0, 1, 1, 2], np.int64)},
        {"teacher_cu_seqlens": np.array([0, 3, 1, 3], np.int64)},
        {"teacher_cu_seqlens": np.array([1, 1, 1, 3], np.int64)},
    ],
    ids=lambda wrong: " ".join(f"{name} {value!r}" for name, value in wrong.items()),
)
def test_a_file_whose_teachers_tables_contradict_each_other_is_refused(wrong):
    assert len(decode_lease(as_file(LEASE, **TABLES)).samples) == 3
    with pytest.raises(UnexpectedAnswer, match="safetensors"):
        decode_lease(as_file(LEASE, **(TABLES | wrong)))


@pytest.mark.parametrize(
    "tensors",
    [
        {"input_ids": np.zeros(TOKENS, np.int64)},
        {"input_ids": np.zeros(TOKENS - 1, np.int32)},
        {"input_ids": np.zeros((1, TOKENS), np.int32)},
        {"old_log_probs": np.zeros(TOKENS, np.float16)},
        {"completion_mask": None},
        {"cu_seqlens": np.array([0, 5, 15], np.int64)},
        {"cu_seqlens": np.array([0, 5, TOKENS], np.int64)},
        {"cu_seqlens": np.array([0, 5, 15, TOKENS + 1], np.int64)},
        {"cu_seqlens": np.array([1, 5, 15, TOKENS], np.int64)},
        {"cu_seqlens": np.array([0, 15, 5, TOKENS], np.int64)},
        {"cu_seqlens": np.array([], np.int64)},
    ],
    ids=lambda tensors: " ".join(f"{name} {value!r}" for name, value in tensors.items()),
)
def test_a_file_whose_tensors_contradict_each_other_is_refused(tensors):
    assert len(decode_lease(as_file(LEASE)).samples) == 3
    with pytest.raises(UnexpectedAnswer, match="safetensors"):
        decode_lease(as_file(LEASE, **tensors))


BROKEN = {
    "nothing": b"",
    "a byte": b"\x01",
    "braces": b"{}",
    "ones": b"\xff" * 64,
    "JSON": json.dumps(LEASE).encode(),
    "cut": as_file(LEASE)[:-1],
    "a wrong type": as_file({**LEASE, "status": 5}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_is_no_lease_file_is_an_unexpected_answer_and_no_other_error(content):
    with client_of(content, MEDIA_TYPE, []) as client, pytest.raises(UnexpectedAnswer):
        client.lease()


FILE = as_file(LEASE)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
def test_a_damaged_byte_gives_a_lease_or_an_unexpected_answer(position, value):
    damaged = bytearray(FILE)
    damaged[position] = value
    with suppress(UnexpectedAnswer):
        assert isinstance(decode_lease(damaged), Lease)
