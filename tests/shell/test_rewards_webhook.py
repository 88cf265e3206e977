"""Reward urls against a real server: a judge that fails never becomes a number."""

import asyncio
import gzip
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from reward_samples import job

from rollout_service.core.model import Scores
from rollout_service.errors import ConfigError
from rollout_service.rewards import RewardScorer, RewardSpec
from tests.listening import end, listening


class Judge:
    """Answers what it is told and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.status = 200
        self.body = b'{"rewards": [0.5, null]}'
        self.headers: dict[str, str] = {}
        self.hang: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        if self.hang is not None:
            await self.hang.wait()
        return web.Response(status=self.status, body=self.body, headers=self.headers)


@pytest.fixture
async def judge() -> AsyncIterator[tuple[Judge, str]]:
    judge = Judge()
    app = web.Application()
    app.router.add_post("/score", judge.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    yield judge, f"http://{host}:{port}/score"
    if judge.hang is not None:
        judge.hang.set()
    await end(runner)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Awaitable[RewardScorer]]]:
    scorers = []

    async def make(url: str, timeout_s: float = 30.0, **more: Any) -> RewardScorer:
        scorer = RewardScorer([RewardSpec(name="judge", url=url, timeout_s=timeout_s)], processes=1, **more)
        scorers.append(scorer)
        await scorer.start()
        return scorer

    yield make
    for scorer in scorers:
        await scorer.stop()


Start = Callable[..., Awaitable[RewardScorer]]


async def test_a_url_gets_the_fields_of_a_function_as_json(judge: tuple[Judge, str], start: Start) -> None:
    server, url = judge
    scorer = await start(url)
    prompt = [{"role": "user", "content": "hé"}]
    scores = await scorer.score(job("a", "b", prompt=prompt, answer={"n": 2**70}, prompts="hidden"))
    assert scores == Scores(rewards={"judge": [0.5, None]})
    assert server.asked == [
        {
            "prompts": [prompt, prompt],
            "completions": ["a", "b"],
            "completion_ids": [[0, 1], [1, 2]],
            "answer": [{"n": 2**70}, {"n": 2**70}],
        }
    ]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (503, b"overloaded", "the webhook answered 503: overloaded"),
        (302, b"", "the webhook answered 302: "),
        (204, b"", "the webhook answered 204: "),
        (200, b'{"rewards": [0.5, NaN]}', "the webhook's answer is not"),
        (200, b'{"rewards": [0.5, 1e999]}', "the webhook's answer is not"),
        (200, b'{"rewards": [0.5, "1"]}', "the webhook's answer is not"),
        (200, b'{"rewards": 1}', "the webhook's answer is not"),
        (200, b'{"scores": [1, 1]}', "the webhook's answer is not"),
        (200, b"[1, 1]", "the webhook's answer is not"),
        (200, b'{"rewards": [0.5, ', "the webhook's answer is not"),
        (200, b"\xff\xfe", "the webhook's answer is not"),
        (200, b'{"rewards": [1]}', "returned 1 rewards for 2 completions"),
        (200, b'{"rewards": [1, 2, 3]}', "returned 3 rewards for 2 completions"),
        (200, b" " * (1 << 20) + b'{"rewards": [1, 2]}', "the webhook answered more than 1048576 bytes"),
    ],
)
async def test_anything_but_a_good_answer_scores_nobody(
    judge: tuple[Judge, str], start: Start, status: int, body: bytes, message: str
) -> None:
    server, url = judge
    server.status, server.body = status, body
    server.headers = {"location": url} if status == 302 else {}
    errors: list[str] = []
    scorer = await start(url, on_error=errors.append)
    scores = await scorer.score(job("a", "b"))
    assert scores.rewards == {"judge": [None, None]}
    assert scores.errors["judge"].startswith(message)
    assert errors == ["judge"]
    assert len(server.asked) == 1
    server.status, server.body, server.headers = 200, b'{"rewards": [1, true]}', {}
    assert await scorer.score(job("a", "b")) == Scores(rewards={"judge": [1.0, 1.0]})


async def test_a_judge_that_hangs_times_out_and_the_next_group_is_scored(
    judge: tuple[Judge, str], start: Start
) -> None:
    server, url = judge
    server.hang = asyncio.Event()
    scorer = await start(url, timeout_s=0.3)
    scores = await asyncio.wait_for(scorer.score(job("a", "b")), 5)
    assert scores == Scores(rewards={"judge": [None, None]}, errors={"judge": "timed out after 0.3 s"})
    server.hang.set()
    assert await scorer.score(job("a", "b")) == Scores(rewards={"judge": [0.5, None]})


async def test_stop_cancels_a_call_under_way(judge: tuple[Judge, str], start: Start) -> None:
    server, url = judge
    server.hang = asyncio.Event()
    errors: list[str] = []
    scorer = await start(url, on_error=errors.append)
    task = asyncio.create_task(scorer.score(job("a", "b")))
    while not server.asked:
        await asyncio.sleep(0.01)
    await scorer.stop()
    server.hang.set()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert errors == []


async def test_a_judge_that_is_restarting_is_asked_once_more(start: Start) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scorer = await start(f"http://127.0.0.1:{port}/score")
    scores = await scorer.score(job("a", "b"))
    assert scores.rewards == {"judge": [None, None]}
    assert scores.errors["judge"].startswith("the webhook could not be asked: ConnectError")


async def test_an_address_that_is_none_is_refused_at_start(start: Start) -> None:
    for url in ("ftp://judge/score", "judge:9000/score", "http://", "http://[::1/score"):
        with pytest.raises(ConfigError, match='reward "judge": url is not an http or https address'):
            await start(url)


async def test_a_broken_answer_is_an_error_and_not_a_crash(start: Start) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n" + json.dumps({"rewards": []}).encode())
        writer.close()

    async with listening(half) as address:
        scorer = await start(f"http://{address}/score")
        scores = await scorer.score(job("a", "b"))
    assert scores.errors["judge"].startswith("the webhook could not be asked: ")


async def test_a_packed_answer_is_never_unpacked(judge: tuple[Judge, str], start: Start) -> None:
    served, url = judge
    bomb = gzip.compress(b" " * 2**26)
    served.body, served.headers = bomb, {"content-encoding": "gzip"}
    scorer = await start(url)
    tracemalloc.start()
    try:
        scores = await scorer.score(job("a", "b"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "which was not asked for" in scores.errors["judge"]
    assert peak < 2**24
    served.body, served.headers = b'{"rewards": [0.5, null]}', {}
    assert (await scorer.score(job("a", "b"))).errors == {}
