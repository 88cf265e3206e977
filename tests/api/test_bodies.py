"""What a body may be: strict JSON, exact types, bounded; anything else is refused and changes nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollout_service.api import body
from tests.api.conftest import Service
from tests.fakes import until

PROBLEM = "application/problem+json"


def is_problem(answer: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    document = answer.json()
    assert document["type"] == f"/problems/{slug}"
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]
    return document


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  ",
        b"{",
        b"nope",
        b'{"version": 7} x',
        b'{"version": NaN}',
        b'{"version": Infinity}',
        b'{"version": 1e400}',
        b'{"version": ' + b"1" * 5000 + b"}",
        b'{"version": "\xff"}',
        b'{"version": "\\ud800"}',
        b'{"\xed\xa0\x80": 1}',
        b"\xef\xbb\xbf{}",
        b"[1]",
        b"7",
        b"null",
        b"[" * 100_000,
        b'{"version": ' + b"[" * 200 + b"]" * 200 + b"}",
    ],
)
async def test_what_is_no_json_object_is_a_400(service: Service, content: bytes):
    is_problem(await service.http.post("/policy_version", content=content), 400, "bad-request")
    assert service.door.version == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (rb'{"version": "\ud800"}', r"\ud800 is half a character (byte 13)"),
        (rb'{"version": ["\ud800"]}', r"\ud800 is half a character (byte 14)"),
        (rb'{"version": "\\\uD83D\uDE00 \uDE00"}', r"\uDE00 is half a character (byte 28)"),
        (rb'{"version": "\\ud800"', "Input data was truncated"),
        (rb'{"version": nope, "b": "\ud800"}', "JSON is malformed: invalid character (byte 16)"),
        (rb'{"version": "\ud83d\ude00"', "Input data was truncated"),
        (b'{"version": "' + b"x" * (body.OFF_LOOP_BYTES - 19) + rb"\ud83d\ude00", "Input data was truncated"),
        (b'{"version": "' + b"\\n" * 2**20, "Input data was truncated"),
    ],
)
async def test_a_body_with_half_a_character_says_so(service: Service, content: bytes, why: str):
    document = is_problem(await service.http.post("/policy_version", content=content), 400, "bad-request")
    assert document["detail"] == f"the body is not JSON: {why}"


@pytest.mark.parametrize("version", ["7", 7.0, 7.5, True, None, -1, 2**53, [7], {}])
async def test_versions_are_integers_and_never_coerced(service: Service, version: Any):
    document = is_problem(await service.post("/policy_version", {"version": version}), 422, "invalid-field")
    assert document["field"] == "version"
    assert document["detail"].startswith("version: ")
    assert service.door.version == 0


async def test_the_greatest_version_is_taken(service: Service):
    answer = await service.post("/policy_version", {"version": 2**53 - 1})
    assert answer.json() == {"version": 2**53 - 1, "previous": 0, "stale_groups": 0, "aborted_rollouts": 0}


@pytest.mark.parametrize(
    ("path", "content", "named"),
    [
        ("/policy_version", {}, "version"),
        ("/policy_version", {"version": 1, "vresion": 1}, "vresion"),
        ("/policy_version", {"version": 1, "reset": 1}, "reset"),
        ("/leases", {}, "max_groups"),
        ("/leases", {"max_groups": 0}, "max_groups"),
        ("/leases", {"max_groups": 1025}, "max_groups"),
        ("/leases", {"max_groups": 8.0}, "max_groups"),
        ("/leases", {"max_groups": True}, "max_groups"),
        ("/leases", {"max_groups": 1, "wait_s": 61}, "wait_s"),
        ("/leases", {"max_groups": 1, "wait_s": -1}, "wait_s"),
        ("/leases", {"max_groups": 1, "wait_s": 0.5}, "wait_s"),
        ("/leases", {"max_groups": 1, "lease_s": 0}, "lease_s"),
        ("/leases", {"max_groups": 1, "lease_s": 86401}, "lease_s"),
        ("/leases", {"max_groups": 1, "request_id": 7}, "request_id"),
        ("/leases", {"max_groups": 1, "request_id": ""}, "request_id"),
        ("/leases", {"max_groups": 1, "consumer": "a\u0000b"}, "consumer"),
        ("/leases", {"max_groups": 4, "min_groups": 5}, "min_groups"),
        ("/leases", {"max_groups": 100, "min_groups": 65}, "min_groups"),
        ("/leases/x/ack", {"group_ids": []}, "group_ids"),
        ("/leases/x/ack", {"group_ids": "g-1"}, "group_ids"),
        ("/leases/x/ack", {"group_ids": [1]}, "group_ids[0]"),
        ("/leases/x/release", {"groups": ["g-1"]}, "groups"),
        ("/leases/x/renew", {"lease_s": 1.0}, "lease_s"),
        ("/prompts", {}, "prompts"),
        ("/prompts", {"prompts": {}}, "prompts"),
        ("/prompts", {"prompts": [], "final": 1}, "final"),
        ("/prompts", {"prompts": [7]}, "prompts[0]"),
        ("/prompts", {"prompts": [{"prompt": "x"}, {"prompt": "x", "epoch": "1"}]}, "epoch"),
        ("/prompts", {"prompts": [{"prompt": "x", "num_generations": 1}]}, "num_generations"),
        ("/prompts", {"prompts": [{"prompt": "x", "sampling": {"n": 2}}]}, "sampling.n"),
        ("/prompts", {"prompts": [{"prompt_token_ids": [1.0]}]}, "prompt_token_ids[0]"),
        ("/prompts", {"prompts": [{"prompt": "x", "extra": 1}]}, "extra"),
    ],
)
async def test_a_422_names_the_field_and_nothing_is_done(service: Service, path: str, content: Any, named: str):
    document = is_problem(await service.post(path, content), 422, "invalid-field")
    assert named in document["detail"]
    assert service.door.version == 0
    assert service.door.status().counts.submitted == 0


@pytest.mark.parametrize(
    ("path", "content", "detail"),
    [
        ("/policy_version", {"version": -1}, "version: expected at least 0, got -1"),
        ("/policy_version", {"version": "7"}, 'version: expected an integer, got "7"'),
        ("/policy_version", {"version": {}}, "version: expected an integer, got an object"),
        ("/policy_version", {"version": 1, "weights": "/w"}, 'weights: expected an object, got "/w"'),
        ("/policy_version", {"version": 1, "weights": {}}, "weights.path: is required"),
        ("/policy_version", {"version": 1, "rest": True}, "rest: unknown key; did you mean reset?"),
        ("/leases", {"max_groups": 1, "consumer": ""}, 'consumer: expected text, not empty, got ""'),
        (
            "/leases",
            {"max_groups": 1, "consumer": "a\nb"},
            'consumer: expected text without control characters, got "a\\nb"',
        ),
        ("/leases", {"max_groups": 4, "min_groups": 5}, "min_groups: 5 is above max_groups, which is 4"),
        ("/leases/x/ack", {"group_ids": []}, "group_ids: expected at least 1 items, got a list"),
    ],
)
async def test_a_422_says_what_was_expected_and_what_was_there(service: Service, path: str, content: Any, detail: str):
    assert is_problem(await service.post(path, content), 422, "invalid-field")["detail"] == detail


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/leases", {"max_groups": 1, "k" * 1_000_000: 1}),
        ("/leases", {f"{n}{'k' * 100_000}": 1 for n in range(60)}),
        ("/leases", {"max_groups": 1, "consumer": "k" * 1_000_000}),
        ("/leases", {"max_groups": "k" * 1_000_000}),
        ("/policy_version", {"version": 1, "weights": {"path": "/w", "k" * 1_000_000: 1}}),
        ("/prompts", {"prompts": [{"prompt": "x", "sampling": {"k" * 1_000_000: 1}}]}),
        ("/prompts", {"prompts": [{"prompt": "x", "k" * 1_000_000: 1}]}),
        ("/engines", {"url": "http://" + "k" * 1_000_000}),
        ("/engines", {"url": "http://e", "max_inflight": "k" * 1_000_000}),
    ],
)
async def test_a_refusal_is_short_however_long_what_it_refuses(service: Service, path: str, content: Any):
    answer = await service.post(path, content)
    assert answer.status_code in (403, 422)
    assert len(answer.content) < 1000


async def test_ten_thousand_prompts_are_the_most_of_one_call(service: Service):
    rows = [{"prompt": "x"}] * 10_001
    document = is_problem(await service.post("/prompts", {"prompts": rows}), 422, "invalid-field")
    assert document["field"] == "prompts"


async def test_any_content_type_is_read_as_json(service: Service):
    for version, kind in enumerate(("application/x-www-form-urlencoded", "text/plain", "application/json"), 1):
        answer = await service.http.post(
            "/policy_version", content=b'{"version": %d}' % version, headers={"content-type": kind}
        )
        assert answer.json()["version"] == version


async def test_an_empty_body_is_enough_where_every_field_is_optional(service: Service):
    for verb in ("ack", "release", "renew"):
        is_problem(await service.http.post(f"/leases/none/{verb}"), 404, "not-found")


async def test_a_body_over_the_limit_is_a_413_whether_its_length_is_announced_or_not(live: Service, monkeypatch):
    monkeypatch.setattr(body, "MAX_BODY_BYTES", 1000)
    large = b'{"version": 7' + b" " * 1000 + b"}"

    async def parts():
        yield large[:600]
        yield large[600:]

    is_problem(await live.http.post("/policy_version", content=large), 413, "body-too-large")
    is_problem(await live.http.post("/policy_version", content=parts()), 413, "body-too-large")
    assert live.door.version == 0


async def test_a_large_body_is_read_whole(service: Service):
    rows = [{"prompt": "x" * 1000, "prompt_id": f"p{n}"} for n in range(500)]
    answer = await service.post("/prompts", {"prompts": rows})
    assert answer.status_code == 202
    assert [group["prompt_id"] for group in answer.json()["groups"]] == [row["prompt_id"] for row in rows]


async def test_a_caller_that_hangs_up_within_its_body_does_no_harm(live: Service):
    with socket.create_connection(("127.0.0.1", live.port)) as caller:
        caller.sendall(b'POST /policy_version HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"version"')
    assert (await live.http.get("/livez")).status_code == 200
    assert live.door.version == 0


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"":0,', b"0,"], ids=["lists", "objects", "fields", "numbers"])
async def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(service: Service, piece: bytes):
    content = b'{"prompts":[' + piece * (body.MAX_BODY_BYTES // len(piece) - 20)
    answer = await service.http.post("/prompts", content=content)
    assert answer.status_code == 413
    assert "send it in parts" in answer.json()["detail"]


async def test_a_body_with_very_many_fields_is_refused_in_one_sentence(service: Service):
    content = b"{" + b",".join(b'"%d":0' % n for n in range(1000)) + b"}"
    answer = await service.http.post("/prompts", content=content)
    assert (answer.status_code, answer.json()["detail"]) == (422, "1000 fields: more than any call takes")


async def test_of_large_bodies_only_a_few_are_held_at_once(live: Service):
    entered: list[int] = []

    async def slow(piece: int) -> AsyncIterator[bytes]:
        entered.append(piece)
        yield b"x" * (body.LARGE_BYTES + 1)
        await released.wait()
        yield b"x"

    released = asyncio.Event()
    calls = [asyncio.create_task(live.http.post("/prompts", content=slow(n))) for n in range(body.LARGE_AT_ONCE + 2)]
    large = live.context.bodies._large
    await until(large.locked)
    assert (await live.http.post("/policy_version", json={"version": 1})).status_code == 200
    released.set()
    assert {(await each).status_code for each in calls} == {400}
    await until(lambda: not large.locked())


async def test_a_body_that_does_not_come_in_time_is_given_up(live: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_S", 0.1)

    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    writer.write(b"POST /prompts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"}"), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"/problems/body-too-slow" in answer


async def test_columns_of_any_size_are_no_columns(service: Service):
    row = {"prompt": "a", "columns": {"text": "x" * (2**24 + 1)}}
    answer = await service.post("/prompts", {"prompts": [row]})
    assert answer.status_code == 422
    assert "a prompt's columns may have" in answer.json()["detail"]
