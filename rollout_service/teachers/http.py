"""HTTP to one teacher: the only module here with an HTTP client.

What always holds: each request has a connection of its own, which ends with it (a teacher reads for longer than a
connect takes, and a kept connection may be closed by the server just as it is used again); cancelling or timing out
closes the connection, by which vLLM stops working on the request; an answer is read up to a limit and never
decompressed, no redirect is followed; no text made here holds credentials.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from rollout_service.engines.answers import error_message
from rollout_service.engines.faults import BadAnswer, RequestTimeout, StatusFault, TransportFault
from rollout_service.engines.http import MAX_CONTROL_ANSWER, answer_limit, plain_session, read_answer
from rollout_service.engines.vllm import public_url
from rollout_service.errors import ConfigError
from rollout_service.teachers.spec import TeacherSpec

CONNECT_S = 10.0
"""A host that does not answer a connect in this time is down."""
MODELS_TIMEOUT_S = 5.0
CANDIDATE_BYTES = 256
"""Of answer for one token's logprob, text and rank: 60 to 100, and more where the text has to be escaped."""
MAX_ANSWER = 2**30
"""Whatever was asked for: 32k tokens with 300 candidates each."""


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a teacher says of itself."""

    model: str
    max_model_len: int | None
    """Tokens of prompt and completion together; None where it does not say."""


class TeacherServer:
    """One teacher's routes. Made inside the running loop, closed by `close`."""

    def __init__(self, spec: TeacherSpec) -> None:
        self.url = public_url(spec.url)
        # A key replaces credentials in the URL: aiohttp refuses to send both.
        self._base = self.url if spec.api_key else spec.url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if spec.api_key:
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
        self._candidates = spec.top_k + 2  # the sampled token, and vLLM's own account of it
        self._session = plain_session(aiohttp.TCPConnector(limit=0, force_close=True), self._headers)

    async def close(self) -> None:
        await self._session.close()

    async def completions(self, body: bytes, *, timeout_s: float) -> bytes:
        """The answer of `POST /v1/completions`. Raises EngineFault."""
        tokens = len(body) // 2  # at most: an id and its comma
        limit = answer_limit(len(body), tokens, CANDIDATE_BYTES * self._candidates, MAX_ANSWER)
        return await self._call("POST", "/v1/completions", body, timeout_s, limit)

    async def served(self, model: str) -> Served:
        """What it serves; `model`: the configured name, or empty for what it serves first.

        Raises ConfigError when what answers is not a teacher for this run, EngineFault when nothing can be said yet.
        """
        try:
            raw = await self._call("GET", "/v1/models", None, MODELS_TIMEOUT_S, MAX_CONTROL_ANSWER)
        except BadAnswer as fault:
            raise ConfigError(f"teacher {self.url} is no OpenAI-compatible server: /v1/models: {fault}") from fault
        except StatusFault as fault:
            if fault.transient:
                raise
            key = " (api_key_env)" if fault.status in (401, 403) else ""
            raise ConfigError(f"teacher {self.url} refuses GET /v1/models{key}: {fault}") from fault
        try:
            models = msgspec.json.decode(raw, type=_Models).data
        except msgspec.DecodeError:
            raise ConfigError(
                f"teacher {self.url} is no OpenAI-compatible server: /v1/models is no list of models"
            ) from None
        for entry in models:
            if entry.id == model or not model:
                return Served(model=entry.id, max_model_len=entry.max_model_len)
        names = ", ".join(repr(entry.id) for entry in models[:8]) or "nothing"
        raise ConfigError(f"teacher {self.url} does not serve model {model!r}; it serves {names}")

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float, limit: int) -> bytes:
        try:
            async with self._session.request(
                method,
                URL(self._base + path),
                # A file-like body is sent in pieces: one of several MB would hold the loop.
                data=None if body is None else io.BytesIO(body),
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(CONNECT_S, timeout_s)),
                allow_redirects=False,
            ) as response:
                raw = await read_answer(response, limit)
        except aiohttp.ConnectionTimeoutError as error:
            raise TransportFault(f"no connection to {self.url} in {min(CONNECT_S, timeout_s):g} s") from error
        except TimeoutError as error:
            raise RequestTimeout(f"{path}: no answer in {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise TransportFault(f"{path}: {words}") from error
        if response.status != 200:
            message, param = error_message(raw)
            retry_after_s = _seconds(response.headers.get("Retry-After", ""))
            raise StatusFault(response.status, message, param=param, retry_after_s=retry_after_s)
        return raw


def _seconds(retry_after: str) -> float | None:
    return float(retry_after) if re.fullmatch(r"\d{1,9}(\.\d+)?", retry_after.strip()) else None
