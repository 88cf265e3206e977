"""One teacher: its limits, its attempts.

What always holds: at most `max_inflight` requests are at the teacher or being decoded; at most `max_attempts` requests
are sent for one sample; a sample either gets the whole table the teacher gave it or a `TeacherFailed`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import Executor

import msgspec
import structlog

from rollout_service.core.model import TeacherTokens
from rollout_service.core.sequences import TokenSequence
from rollout_service.engines.faults import EngineFault, StatusFault, TransportFault
from rollout_service.engines.retry import RetryPolicy
from rollout_service.errors import ConfigError
from rollout_service.teachers.answers import teacher_tokens
from rollout_service.teachers.http import Served, TeacherServer
from rollout_service.teachers.spec import TeacherSpec

DOWN_PAUSE_S = 0.5
"""Between two tries to reach a teacher that is down."""
LARGE_ANSWER = 32_768
"""Bytes that take a millisecond to decode; larger answers are decoded in a thread."""

log = structlog.get_logger(__name__)


class TeacherFailed(Exception):
    """The teacher did not score a sample; says why, for people."""


class Teacher:
    """One configured teacher, on the event loop that ran `start`."""

    def __init__(self, spec: TeacherSpec, decoding: Executor, *, wait_s: float = 0.0) -> None:
        """`decoding` decodes large answers; `wait_s`: how long a sample waits for a teacher that is down."""
        self._wait_s = wait_s
        self.spec = spec
        self._decoding = decoding
        self._policy = RetryPolicy(max_attempts=spec.max_attempts)
        self._slots = asyncio.Semaphore(spec.max_inflight)
        self._server: TeacherServer | None = None
        self._served: Served | None = None

    async def start(self) -> None:
        """Asks what it serves. One that is down now may come; one that is wrong for the run is a ConfigError."""
        self._server = TeacherServer(self.spec)
        try:
            self._served = await self._server.served(self.spec.model)
        except EngineFault as fault:
            log.warning("teacher_unreachable", teacher=self.spec.id, url=self._server.url, error=str(fault))

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    async def score(self, sequences: Sequence[TokenSequence]) -> tuple[TeacherTokens, ...]:
        """The tables of a rollout's samples, one after the other. Raises TeacherFailed; cancelling closes connections.

        The logprobs are those at temperature 1: vLLM applies no sampling parameter to prompt logprobs.
        """
        return tuple([await self._table(sequence) for sequence in sequences])

    async def _table(self, sequence: TokenSequence) -> TeacherTokens:
        attempts = 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                async with self._slots:
                    return await self._once(sequence)
            except ConfigError as error:  # it was down at the start, and now turns out to be wrong
                raise TeacherFailed(str(error)) from error
            except EngineFault as error:
                fault = error
            if isinstance(fault, TransportFault) and loop.time() - began < self._wait_s and await self._down():
                # It is down, which says nothing about the sample (as with engines, design 3.2.5).
                await asyncio.sleep(DOWN_PAUSE_S)
                continue
            attempts += 1
            if self._policy.gives_up(attempts, fault):
                raise TeacherFailed(self._words(fault, attempts)) from fault
            # Jitter only; nothing secret depends on it.
            jitter = random.random()  # noqa: S311 - spreads load, guards nothing
            await asyncio.sleep(self._policy.pause_s(attempts, jitter=jitter, retry_after_s=fault.retry_after_s))

    async def _down(self) -> bool:
        """Whether the teacher answers nothing at all."""
        if self._server is None:
            return False
        try:
            await self._server.served(self.spec.model)
        except EngineFault:
            return True
        except ConfigError:  # something answers: the next try tells what is wrong with it
            return False
        return False

    async def _once(self, sequence: TokenSequence) -> TeacherTokens:
        server, spec = self._server, self.spec
        if server is None:
            raise TeacherFailed("the service is ending")
        served = self._served
        if served is None:
            served = self._served = await server.served(spec.model)
        length = len(sequence.input_ids)
        # vLLM generates one token at least, so a prompt that fills its context is refused.
        if served.max_model_len is not None and length >= served.max_model_len:
            raise TeacherFailed(
                f"a sample of {length} tokens does not fit the teacher, which reads {served.max_model_len - 1} "
                "(its max_model_len less the one token it has to generate)"
            )
        try:
            raw = await server.completions(_body(served.model, sequence, spec.top_k), timeout_s=spec.timeout_s)
        except StatusFault as fault:
            if fault.status == 404:  # it may have been started again with another model
                self._served = None
            raise
        if len(raw) <= LARGE_ANSWER:
            return teacher_tokens(raw, sequence, teacher_id=spec.id, top_k=spec.top_k)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, self._decoded, raw, sequence)

    def _decoded(self, raw: bytes, sequence: TokenSequence) -> TeacherTokens:
        return teacher_tokens(raw, sequence, teacher_id=self.spec.id, top_k=self.spec.top_k)

    def _words(self, fault: EngineFault, attempts: int) -> str:
        hint = ""
        if isinstance(fault, StatusFault) and fault.status == 400 and "prompt logprobs" in str(fault):
            hint = f"; teachers.top_k is {self.spec.top_k}, the server's own bound is --max-logprobs"
        return f"{fault}{hint}" if attempts == 1 else f"{fault}{hint} (request {attempts} of {attempts})"


def _body(model: str, sequence: TokenSequence, top_k: int) -> bytes:
    """Read all of the sample, and generate the one token vLLM insists on; what it is, nobody looks at."""
    body = {
        "model": model,
        "prompt": sequence.input_ids.tolist(),
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": top_k,
    }
    return msgspec.json.encode(body)
