"""One vLLM server, over HTTP.

What always holds: generation and `/detokenize` go over one shared aiohttp session without a limit of connections,
everything else over httpx, so that an abort never queues behind generations; an idle connection is kept 2 s, less than
any server keeps it; a request that is cancelled or timed out, or whose answer does not end, has its connection closed
AND its abort id sent; no text or log of this module holds credentials.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import httpx
import msgspec
import structlog
from yarl import URL

from rollout_service.core.model import Turn
from rollout_service.engines.aborts import AbortBatch, AbortEvents
from rollout_service.engines.answers import chat_turn, error_message, text_turn
from rollout_service.engines.engine_load import Limit
from rollout_service.engines.faults import BadAnswer, RequestTimeout, StaleConnection, StatusFault, TransportFault
from rollout_service.engines.http import (
    CONTROL_TIMEOUT_S,
    FLIGHT,
    EngineClients,
    Flight,
    answer_limit,
    control_call,
    read_answer,
)
from rollout_service.engines.info import ABORT_PATHS, AbortMode, EngineInfo, logprobs_mode, priorities, vocab_size
from rollout_service.engines.requests import GenerateRequest, Route, encode_body
from rollout_service.engines.settings import CallTracer
from rollout_service.errors import ConfigError

CONNECT_S = 10.0
"""A host that does not answer a connect in this time is down."""
CONNECT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
"""The rest is timed here: aiohttp's own timer costs as much as the whole of a decoded answer."""
STALE_WITHIN_S = 5.0
"""A lost race against an idle close shows within a round trip; what breaks later was the engine's doing."""
MODELS_TIMEOUT_S = 5.0
SERVER_INFO_TIMEOUT_S = 60.0
"""The first /server_info of a vLLM server collects facts about its machine, which takes 1 to 12 s."""
DETOKENIZE_TIMEOUT_S = 10.0
LARGE_BODY = 1_000_000
"""aiohttp warns of bytes bodies above 1 MiB (they hold the loop); larger ones are sent in pieces of this size."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """An engine as configured."""

    url: str
    """Base URL, without `/v1`."""
    max_inflight: Limit = 256
    """Generation requests at once, >= 1; "auto": as many as it bears."""
    ceiling: int = 1024
    """Most requests at once where that is "auto"."""
    api_key: str = field(default="", repr=False)
    """Bearer key, or empty."""


def public_url(url: str) -> str:
    """`url` without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


class VllmEngine:
    """One vLLM server."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        id: str,
        clients: EngineClients,
        events: AbortEvents,
        clock: Callable[[], float],
        model_name: Callable[[str], str] = lambda served: served,
        cache_salt: Callable[[], str | None] = lambda: None,
        tracer: CallTracer | None = None,
    ) -> None:
        """`model_name`: what requests call the model, given the name it is served under.

        `cache_salt`: what tells prefixes apart that were cached with other weights; None: nothing does.
        """
        self.id = id
        self.url = public_url(spec.url)
        self.info: EngineInfo | None = None
        """What `learn` read last."""
        # A key replaces credentials in the URL: aiohttp refuses to send both.
        self._base = self.url if spec.api_key else spec.url.rstrip("/")
        self._clients = clients
        self._clock = clock
        self._model_name = model_name
        self._cache_salt = cache_salt
        self._tracer = tracer
        self._auth = {"Authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
        self._headers = {"Content-Type": "application/json", **self._auth}
        self._routes = {route: URL(self._base + route.path) for route in Route}
        self._detokenize = URL(self._base + "/detokenize")
        self._out: dict[str, float] = {}
        """Abort id -> when its request was sent, of what is at the engine."""
        self._of: dict[str, list[str]] = {}
        """Rollout -> its abort ids there."""
        self._ahead: set[str] = set()
        """Told to abort before their tasks were cancelled."""
        self._aborts = AbortBatch(self._abort, events, clock=clock, url=self.url)
        self._close_only_said = False

    # -- generation

    async def generate(
        self, request: GenerateRequest, request_id: str, *, timeout_s: float, fresh: bool = False
    ) -> Turn:
        """Generate once. `fresh`: on a connection of its own. Raises `EngineFault`; cancelling aborts at the engine.

        The engine must have been learnt.
        """
        if self._tracer is None:
            return await self._generate(request, request_id, timeout_s, fresh, {})
        with self._tracer.call(request, request_id, self.url) as call:
            turn = await self._generate(request, request_id, timeout_s, fresh, call.headers)
            call.answered(turn)
            return turn

    async def _generate(
        self, request: GenerateRequest, request_id: str, timeout_s: float, fresh: bool, headers: Mapping[str, str]
    ) -> Turn:
        info = self.info
        if info is None:
            raise TransportFault(f"{self.url} was never reached")
        route = request.route
        abort_id = route.abort_id(request_id)
        body = encode_body(
            request,
            request_id,
            self._model_name(info.model),
            cache_salt=self._cache_salt(),
            priority=request.priority if info.priorities else None,
        )
        flight = Flight()
        FLIGHT.set(flight)
        session = self._clients.fresh if fresh else self._clients.generation
        limit = answer_limit(len(body), request.sampling.get("max_tokens"))
        sent_at = self._out[abort_id] = self._clock()
        self._of.setdefault(request.rollout, []).append(abort_id)
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                # Without `async with`, which would cost a task switch more: read_answer reads to the end, or closes.
                response = await session.post(
                    self._routes[route],
                    data=body if len(body) <= LARGE_BODY else _pieces(body),
                    headers={**self._headers, "X-Request-Id": request_id, **headers},
                    timeout=CONNECT,
                    allow_redirects=False,
                )
                answered = True
                raw = await read_answer(response, limit)
            ahead = abort_id in self._ahead
        except (asyncio.CancelledError, BadAnswer):
            if abort_id not in self._ahead:
                self._aborts.add(abort_id, sent_at)
                raise
            raise asyncio.CancelledError from None
        except aiohttp.ConnectionTimeoutError as error:
            raise TransportFault(f"no connection to {self.url} in {CONNECT_S:g} s") from error
        except TimeoutError as error:
            if abort_id in self._ahead:
                raise asyncio.CancelledError from None
            if flight.connecting:
                raise TransportFault(f"no connection to {self.url} in {timeout_s:.3g} s") from error
            self._aborts.add(abort_id, sent_at)
            raise RequestTimeout(f"no answer in {timeout_s:.3g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if abort_id in self._ahead:
                raise asyncio.CancelledError from None  # what comes of an abort of ours says nothing of the engine
            raise self._broken(error, flight, answered, sent_at) from error
        finally:
            self._ended(request.rollout, abort_id)
        if ahead:
            raise asyncio.CancelledError  # what the engine gives for an abort is nobody's: the task is being cancelled
        if response.status != 200:
            raise _refusal(response.status, raw, response.headers.get("Retry-After"))
        if route is Route.CHAT:
            return chat_turn(raw, vocab_size=info.vocab_size, engine=self.id)
        return text_turn(raw, sent_ids=request.token_ids, vocab_size=info.vocab_size, engine=self.id)

    def _ended(self, rollout: str, abort_id: str) -> None:
        del self._out[abort_id]
        self._ahead.discard(abort_id)
        ids = self._of[rollout]
        ids.remove(abort_id)
        if not ids:
            del self._of[rollout]

    def _broken(self, error: Exception, flight: Flight, answered: bool, sent_at: float) -> TransportFault:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, aiohttp.ContentTypeError | aiohttp.ClientPayloadError) or answered:
            return TransportFault(f"the connection broke inside the answer: {detail}")
        if flight.opened or self._clock() - sent_at > STALE_WITHIN_S:
            return TransportFault(detail)
        return StaleConnection(detail)

    # -- aborting

    async def abort(self, rollouts: Collection[str]) -> None:
        """Abort what is at the engine for `rollouts`, in one call, before their tasks are cancelled.

        A thousand connections take longer to close than one list to be read, and one whose answer comes, if only to say
        that it was aborted, can be used again. Returns when the engine has answered; raises nothing.
        """
        if self.info is None or self.info.abort is AbortMode.CLOSE:
            return
        ids = [abort_id for rollout in rollouts for abort_id in self._of.get(rollout, ())]
        if ids:
            self._ahead.update(ids)
            await self._aborts.now([(abort_id, self._out[abort_id]) for abort_id in ids])

    async def _abort(self, ids: list[str]) -> None:
        mode = self.info.abort if self.info else AbortMode.CLOSE
        if mode is AbortMode.CLOSE:
            return
        status, raw = await self._call("POST", ABORT_PATHS[mode], {"request_ids": ids})
        if status == 404 and self.info is not None:
            self.info = replace(self.info, abort=AbortMode.CLOSE)
            self._say_close_only()
        elif status != 200:
            raise _refusal(status, raw, None)

    async def close(self) -> None:
        """Abort what is out, and wait for the abort calls (bounded)."""
        for abort_id, sent_at in self._out.items():
            self._aborts.add(abort_id, sent_at)
        await self._aborts.close()

    def _say_close_only(self) -> None:
        if self._close_only_said:
            return
        self._close_only_said = True
        log.warning(
            "engine_has_no_abort_route",
            engine=self.url,
            detail="requests are aborted by closing their connections only; VLLM_SERVER_DEV_MODE=1 adds the route",
        )

    # -- control

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        """Call a control route; the body of its answer. Raises EngineFault for everything but 200."""
        try:
            async with asyncio.timeout(timeout_s):
                status, raw = await self._call(method, path, body, timeout_s)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RequestTimeout(f"{method} {path}: no answer in {timeout_s:g} s") from error
        except (httpx.HTTPError, OSError) as error:
            raise TransportFault(f"{method} {path}: {_words(error)}") from error
        if status != 200:
            raise _refusal(status, raw, None)
        return raw

    async def _call(
        self, method: str, path: str, body: Any = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> tuple[int, bytes]:
        return await control_call(
            self._clients.control, method, self._base + path, headers=self._auth, body=body, timeout_s=timeout_s
        )

    async def probe(self, timeout_s: float) -> str | None:
        """None when `/health` is 200, else why not."""
        try:
            async with asyncio.timeout(timeout_s):
                status, _ = await self._call("GET", "/health", None, timeout_s)
        except TimeoutError:
            return f"/health: no answer in {timeout_s:g} s"
        except BadAnswer as fault:
            return f"/health: {fault}"
        except (httpx.HTTPError, OSError) as error:
            return f"/health: {_words(error)}"
        return None if status == 200 else f"/health: HTTP {status}"

    async def is_back(self, model: str) -> bool:
        """Whether it serves what it served when it was learnt; `model` as for `learn`, which tells the rest.

        Quick: a vLLM that has just started takes up to 12 s to answer its first /server_info. Raises as `learn`.
        """
        known = self.info
        if known is None or await self._served(model) != (known.model, known.max_model_len):
            return False
        self.info = replace(known, priorities=False)  # not to be named where it is not sure
        return True

    async def learn(self, model: str) -> EngineInfo:
        """Read what the engine serves; `model`: the configured name, or empty for what it serves first.

        Raises ConfigError when what answers is not an engine for this run, TransportFault or StatusFault when
        nothing can be said yet.
        """
        served, max_model_len = await self._served(model)
        status, config = await self._server_info()
        if status == 404:
            abort = await self._scale_out()
        else:
            abort = AbortMode.REQUESTS
        self.info = EngineInfo(
            model=served,
            max_model_len=max_model_len,
            logprobs_mode=logprobs_mode(config),
            vocab_size=vocab_size(config),
            abort=abort,
            priorities=priorities(config),
        )
        if abort is AbortMode.CLOSE:
            self._say_close_only()
        return self.info

    async def detokenize(self, ids: array[int]) -> str | None:
        """The engine's own text of `ids`; None where the engine has no such route. Raises EngineFault."""
        body = msgspec.json.encode({"model": self.info.model if self.info else "", "tokens": ids.tolist()})
        try:
            async with self._clients.generation.post(
                self._detokenize,
                data=body if len(body) <= LARGE_BODY else _pieces(body),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=DETOKENIZE_TIMEOUT_S, sock_connect=CONNECT_S),
                allow_redirects=False,
            ) as response:
                raw = await read_answer(response, answer_limit(len(body), len(ids)))
        except TimeoutError as error:
            raise RequestTimeout(f"/detokenize: no answer in {DETOKENIZE_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransportFault(f"/detokenize: {_words(error)}") from error
        if response.status == 404:
            return None
        if response.status != 200:
            raise _refusal(response.status, raw, None)
        try:
            return msgspec.json.decode(raw, type=_Detokenized).prompt
        except msgspec.DecodeError as error:
            raise BadAnswer(f"/detokenize: {error}") from error

    async def _served(self, model: str) -> tuple[str, int | None]:
        where = f"{self.url}/v1/models"
        try:
            status, raw = await self._get("/v1/models", MODELS_TIMEOUT_S)
        except BadAnswer as fault:
            raise ConfigError(f"{where} is no OpenAI-compatible server: {fault}") from fault
        if status in (401, 403):
            given = "refuses its API key" if self._auth else "needs an API key (api_key_env)"
            raise ConfigError(f"engine {self.url} {given}: GET /v1/models answered {status}")
        if status != 200:
            refusal = _refusal(status, raw, None)
            if refusal.transient:
                raise refusal
            raise ConfigError(f"{where} is no OpenAI-compatible server: it answered {status}")
        try:
            models = msgspec.json.decode(raw, type=_Models).data
        except msgspec.DecodeError:
            raise ConfigError(f"{where} is no OpenAI-compatible server: the answer is no list of models") from None
        for entry in models:
            if entry.id == model or not model:
                return entry.id, entry.max_model_len
        names = ", ".join(repr(entry.id) for entry in models[:8]) or "nothing"
        raise ConfigError(f"engine {self.url} does not serve model {model!r}; it serves {names}")

    async def _server_info(self) -> tuple[int, Any]:
        """(status, the configuration it tells or None). A route that is there but slow or broken counts as 500."""
        try:
            status, raw = await self._get("/server_info?config_format=json", SERVER_INFO_TIMEOUT_S)
        except (RequestTimeout, BadAnswer):
            return 500, None
        if status != 200:
            return status, None
        try:
            info = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return 200, raw.decode("utf-8", "replace")
        return 200, info.get("vllm_config", info) if isinstance(info, dict) else info

    async def _scale_out(self) -> AbortMode:
        # On this route, unlike on /abort_requests, an empty list aborts nothing.
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                status, _ = await self._call("POST", ABORT_PATHS[AbortMode.SCALE_OUT], {"request_ids": []})
        except TimeoutError as error:
            raise RequestTimeout(f"the abort route gave no answer in {CONTROL_TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            raise TransportFault(_words(error)) from error
        return AbortMode.SCALE_OUT if status == 200 else AbortMode.CLOSE

    async def _get(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call("GET", path, None, timeout_s)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise RequestTimeout(f"GET {path}: no answer in {timeout_s:g} s") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(f"engine {self.url} is no http or https URL: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            if _speaks_otherwise(error):
                raise ConfigError(f"engine {self.url} is no OpenAI-compatible server: {error}") from error
            raise TransportFault(f"GET {path}: {_words(error)}") from error


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Detokenized(msgspec.Struct):
    prompt: str


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), LARGE_BODY):
        yield body[at : at + LARGE_BODY]


_HUNG_UP: Final = ("disconnected", "closed connection", "incomplete chunked read")
"""What httpx calls a connection that ended before its answer, or within it."""


def _speaks_otherwise(error: Exception) -> bool:
    """Whether something answered that speaks no HTTP, or other TLS than ours; one that hung up said nothing of that."""
    if isinstance(error, httpx.RemoteProtocolError):
        return not any(words in str(error) for words in _HUNG_UP)
    return isinstance(error, httpx.ConnectError) and "[SSL" in str(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refusal(status: int, raw: bytes, retry_after: str | None) -> StatusFault:
    message, param = error_message(raw)
    return StatusFault(status, message, param=param, retry_after_s=_seconds(retry_after))


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds; it may also be a date."""
    if not retry_after:
        return None
    if re.fullmatch(r"\d{1,9}(\.\d+)?", retry_after.strip()):
        return float(retry_after)
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return (at - datetime.now(at.tzinfo)).total_seconds()
