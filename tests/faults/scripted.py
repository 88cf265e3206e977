"""An engine whose every generation a test scripts by its prompt, and that obeys aborts as vLLM does.

The newest matching rule decides; without one the engine answers at once. An attempt is one generation request.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from tests.engine_script import MODEL, Asked, Reply, ScriptedEngine
from tests.service import until


@dataclass(frozen=True, kw_only=True)
class Act:
    """What happens to one attempt. `hold` waits for `release`, `delay` that many seconds."""

    text: str | None = None
    """None: a reward and text of its own for every attempt."""
    hold: bool = False
    delay: float = 0.0
    ignore_abort: bool = False
    status: int = 200
    message: str = "scripted error"
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reply: Reply | None = None
    """Over everything above but the waiting."""


@dataclass(eq=False)
class Attempt:
    """One generation request and how it ended."""

    seq: int
    nth: int
    """How many for the same prompt came before."""
    asked: Asked
    prompt: str
    act: Act = field(default_factory=Act)
    left: str | None = None
    """`aborted` or `disconnected`: the caller wanted no answer any more."""
    signal: asyncio.Future[Act] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def body(self) -> dict[str, Any]:
        return self.asked.body

    @property
    def running(self) -> bool:
        return self.asked.outcome is None


Rule = Act | Callable[[Attempt], Act]


def says(reward: object, tag: str = "", **more: Any) -> Act:
    """A completion that the fault rewards score with `reward`."""
    return Act(text=f"r={reward};{tag}", **more)


def answers(**reply: Any) -> Act:
    """A reply in the words of the scripted engine: ids, logprobs, finish_reason, body, change, cut, cut_inside."""
    return Act(reply=Reply(**reply))


class Engine(ScriptedEngine):
    """Use as `async with Engine() as engine`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.script = self._scripted
        self.models = {"data": [{"id": MODEL, "max_model_len": 4096}]}
        self.attempts: list[Attempt] = []
        self.down_status: int | None = None
        """Set: every route answers this status."""
        self._rules: list[tuple[str | None, Rule]] = []
        self._per_prompt: Counter[str] = Counter()

    def on(self, match: str | None, act: Rule) -> None:
        """`match`: text in the prompt; None: every prompt."""
        self._rules.insert(0, (match, act))

    def find(self, match: str | None = None) -> list[Attempt]:
        return [attempt for attempt in self.attempts if match is None or match in attempt.prompt]

    def in_flight(self, match: str | None = None) -> list[Attempt]:
        return [attempt for attempt in self.find(match) if attempt.running]

    async def holding(self, count: int, match: str | None = None) -> list[Attempt]:
        """The attempts in flight, once there are exactly `count`."""
        await until(lambda: len(self.in_flight(match)) == count, what=f"{count} in flight of {match}")
        return self.in_flight(match)

    def release(self, match: str | None = None, act: Act | None = None, limit: int | None = None) -> None:
        """Let held attempts go on, with `act` or as scripted without the wait."""
        for attempt in self.in_flight(match)[:limit]:
            _signal(attempt, act or replace(attempt.act, hold=False, delay=0.0))

    async def _scripted(self, asked: Asked) -> Reply:
        text = _prompt_text(asked.body)
        attempt = Attempt(len(self.attempts), self._per_prompt[text], asked, text)
        self._per_prompt[text] += 1
        self.attempts.append(attempt)
        if self.down_status is not None:
            return _error(self.down_status, Act(message="Bad Gateway"))
        rule = next((rule for match, rule in self._rules if match is None or match in text), Act())
        act = attempt.act = rule if isinstance(rule, Act) else rule(attempt)
        try:
            while act.hold or act.delay:
                done, _ = await asyncio.wait({attempt.signal}, timeout=None if act.hold else act.delay)
                if not done:
                    break
                attempt.act = act = attempt.signal.result()
                attempt.signal = asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            attempt.left = attempt.left or "disconnected"
            raise
        if act.reply is not None:
            return act.reply
        if act.status != 200:
            return _error(act.status, act)
        words = act.text if act.text is not None else f"r={attempt.seq % 5 / 4};a{attempt.seq}"
        return Reply(ids=list(words.encode()))

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if self.down_status is not None:
            return web.Response(status=self.down_status)
        answer = await super()._control(request)
        if request.path.endswith("/abort_requests") and answer.status == 200:
            wanted = set((await request.json())["request_ids"])
            for attempt in self.in_flight():
                if attempt.asked.abort_id in wanted:
                    attempt.left = "aborted"
                    if not attempt.act.ignore_abort:
                        _signal(attempt, answers(ids=[112, 97], finish_reason="abort"))
        return answer


def _signal(attempt: Attempt, act: Act) -> None:
    if not attempt.signal.done():
        attempt.signal.set_result(act)


def _prompt_text(body: dict[str, Any]) -> str:
    if "messages" in body:
        return "".join(message["content"] or "" for message in body["messages"])
    given = body["prompt"]
    return given if isinstance(given, str) else bytes(i for i in given if i < 256).decode("utf-8", "replace")


def _error(status: int, act: Act) -> Reply:
    error = {"message": act.message, "type": "BadRequestError", "param": act.param, "code": status}
    return Reply(status=status, body=json.dumps({"error": error}).encode(), headers=act.headers)
