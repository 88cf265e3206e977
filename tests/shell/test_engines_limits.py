"""What an engine can do to us with its answers: endless ones, packed ones, and ones that point elsewhere."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rollout_service.core.model import FailureReason
from rollout_service.engines import Fleet, GenerationFailed
from rollout_service.engines.faults import BadAnswer, EngineFault
from rollout_service.engines.http import BASE_ANSWER, MAX_ANSWER, MAX_CONTROL_ANSWER, answer_limit
from rollout_service.errors import ConfigError
from tests.engine_fleets import Counted, ask, fleet_of, generate, until
from tests.engine_script import Reply, ScriptedEngine

PIECE = b" " * 2**18
BOMB = gzip.compress(b'{"data": [' + b" " * 2**27 + b"]}")
"""128 MiB in 130 KB."""
ROOM = 3 * BASE_ANSWER
"""Bytes of Python objects beyond which a bounded answer was not bounded."""


class Overflowing(ScriptedEngine):
    """Answers the `endless` paths with blanks until the caller closes; the `packed` ones with a gzip bomb; redirects
    the `moved` ones."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.endless: set[str] = set()
        self.packed: set[str] = set()
        self.moved: dict[str, str] = {}
        self.status = 200
        self.length: str | None = None
        self.sent = self.hung_up = 0

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths[request.path] += 1
        if request.path in self.moved:
            return web.Response(status=307, headers={"Location": self.moved[request.path] + request.path})
        if request.path in self.packed:
            return web.Response(body=BOMB, headers={"Content-Encoding": "gzip"}, content_type="application/json")
        if request.path in self.endless:
            return await self._pour(request)
        self.paths[request.path] -= 1
        return await super()._handle(request)

    async def _pour(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status)
        if self.length is not None:
            response.content_length = int(self.length)
        await response.prepare(request)
        try:
            while True:
                await response.write(PIECE)
                self.sent += len(PIECE)
        finally:
            self.hung_up += 1


@pytest.fixture
async def engine() -> AsyncIterator[Overflowing]:
    async with Overflowing() as engine:
        yield engine


@pytest.fixture
def bounded() -> Any:
    """A function that says how many bytes of Python objects were there at most since the test began."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    yield lambda: tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()


async def failure(fleet: Fleet) -> GenerationFailed:
    with pytest.raises(GenerationFailed) as caught:
        await generate(fleet)
    return caught.value


async def test_a_completion_that_does_not_end_is_a_failed_attempt_and_closed_and_aborted(
    engine: Overflowing, bounded: Any
) -> None:
    events = Counted()
    async with fleet_of(engine, max_attempts=2, events=events) as fleet:
        engine.endless = {"/v1/completions"}
        failed = await failure(fleet)
        assert (failed.reason, failed.attempts) == (FailureReason.BAD_ANSWER, 2)
        assert "longer than" in str(failed)
        await until(lambda: engine.hung_up == 2)
        await until(lambda: events.aborts == 2)
        assert bounded() < ROOM
        engine.endless = set()
        await generate(fleet)


async def test_a_completion_announced_as_too_long_is_not_read_at_all(engine: Overflowing, bounded: Any) -> None:
    async with fleet_of(engine, max_attempts=1) as fleet:
        engine.endless, engine.length = {"/v1/completions"}, str(2**34)
        assert (await failure(fleet)).reason == FailureReason.BAD_ANSWER
        await until(lambda: engine.hung_up == 1)
        assert bounded() < ROOM / 2


async def test_an_error_that_does_not_end_keeps_its_status(engine: Overflowing, bounded: Any) -> None:
    async with fleet_of(engine, max_attempts=3) as fleet:
        engine.endless, engine.status = {"/v1/completions"}, 400
        failed = await failure(fleet)
        assert (failed.reason, failed.attempts) == (FailureReason.REJECTED, 1)
        assert bounded() < ROOM


async def test_a_long_completion_within_what_was_asked_for_is_taken(engine: Overflowing) -> None:
    ids = [104] * 200_000
    async with fleet_of(engine) as fleet:
        engine.script = lambda asked: Reply(ids=ids)
        assert len((await generate(fleet, ask(max_tokens=200_000))).turn.output_ids) == 200_000
        assert len((await generate(fleet, ask(max_tokens=8))).turn.output_ids) == 200_000, "4 MB are always taken"


async def test_a_packed_completion_is_refused_unopened_and_none_was_asked_for(
    engine: Overflowing, bounded: Any
) -> None:
    async with fleet_of(engine, max_attempts=1) as fleet:
        await generate(fleet)
        assert engine.asked[0].headers["accept-encoding"] == "identity"
        engine.packed = {"/v1/completions"}
        failed = await failure(fleet)
        assert (failed.reason, "gzip" in str(failed)) == (FailureReason.BAD_ANSWER, True)
        assert bounded() < ROOM


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/health", "/detokenize"])
@pytest.mark.parametrize("kind", ["endless", "packed"])
async def test_control_answers_are_bounded_too(engine: Overflowing, bounded: Any, path: str, kind: str) -> None:
    async with Overflowing() as other, fleet_of(other, probe_interval_s=0.02) as fleet:
        setattr(other, kind, {path})
        match path:
            case "/detokenize":
                assert await fleet.prompt_text(array("i", [1])) is None
            case "/health":
                await until(lambda: not fleet.describe()[0]["healthy"])
                assert "the answer is" in str(fleet.describe()[0]["error"])
            case "/v1/models":
                with pytest.raises(ConfigError, match="no OpenAI-compatible server"):
                    async with fleet_of(other):
                        pass
            case "/server_info":
                async with fleet_of(other) as second:
                    assert second.describe()[0]["logprobs_mode"] is None
        assert bounded() < ROOM


async def test_an_endless_weight_version_or_load_is_a_fault(engine: Overflowing, bounded: Any) -> None:
    async with fleet_of(engine) as fleet:
        (member,) = fleet._members
        engine.endless = {"/collective_rpc"}
        with pytest.raises(BadAnswer, match="longer"):
            await member.engine.control("POST", "/collective_rpc", {}, timeout_s=10)
        assert bounded() < ROOM


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/health", "/detokenize", "/collective_rpc"])
async def test_no_call_follows_a_redirect(engine: Overflowing, path: str) -> None:
    async with Overflowing() as target, fleet_of(engine, probe_interval_s=0.02) as fleet:
        (member,) = fleet._members
        engine.moved = {path: target.url}
        match path:
            case "/v1/models":
                with pytest.raises(ConfigError, match="307"):
                    async with fleet_of(engine):
                        pass
            case "/server_info":
                async with fleet_of(engine) as second:
                    assert second.describe()[0]["logprobs_mode"] is None
            case "/health":
                await until(lambda: not fleet.describe()[0]["healthy"])
                assert fleet.describe()[0]["error"] == "/health: HTTP 307"
            case "/detokenize":
                assert await fleet.prompt_text(array("i", [1])) is None
            case "/collective_rpc":
                with pytest.raises(EngineFault, match="307"):
                    await member.engine.control("POST", path, {}, timeout_s=5)
        assert target.paths.total() == 0


async def test_neither_aborts_nor_generations_follow_a_redirect(engine: Overflowing) -> None:
    events = Counted()
    async with Overflowing() as target, fleet_of(engine, events=events) as fleet:
        engine.moved = dict.fromkeys(["/abort_requests", "/v1/completions"], target.url)
        assert (await failure(fleet)).reason == FailureReason.REJECTED
        engine.moved.pop("/v1/completions")

        async def never() -> Reply:
            await asyncio.Event().wait()
            return Reply()

        engine.script = lambda asked: never()
        task = asyncio.ensure_future(generate(fleet))
        await engine.wait_asked(1)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: events.failed_aborts)
        assert target.paths.total() == 0


def test_the_limit_grows_with_what_was_asked_for_up_to_a_bound() -> None:
    assert answer_limit(0, 0) == BASE_ANSWER
    assert answer_limit(1_000, 32_768) == BASE_ANSWER + 16_000 + 2**25
    assert answer_limit(2**26, 10_000_000) == answer_limit(0, None) == MAX_ANSWER
    assert MAX_CONTROL_ANSWER <= BASE_ANSWER
