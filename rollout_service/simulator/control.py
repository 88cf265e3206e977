"""The other routes of a vLLM server: what it serves, its load, aborting, pausing, weights.

Always holds: a route that real vLLM has under a flag (dev mode, scale-out) does not exist, or is refused, without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from .bodies import Refusal
from .content import SPECIALS, chat_prompt, decode_ids, encode_text
from .engine import Engine, PauseMode
from .journal import Journal
from .server import no_scale_out
from .settings import SimulatorSettings
from .wire import Exchange

Handler = Callable[[Exchange], None]
VERSION = "0.32.0"

_METRICS = (
    ("num_requests_running", "gauge", "Number of requests in model execution batches."),
    ("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine."),
    ("prompt_tokens_total", "counter", "Number of prefill tokens processed."),
    ("generation_tokens_total", "counter", "Number of generation tokens processed."),
    ("prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    ("prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of number of cached tokens."),
)


class Control:
    """Handlers of everything but generation."""

    def __init__(
        self, settings: SimulatorSettings, engine: Engine, journal: Journal, *, changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._journal = journal
        self._changed = changed

    def routes(self) -> dict[tuple[str, str], Handler]:
        """(method, path) → handler, of the routes that exist under these settings."""
        always: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/version"): lambda exchange: exchange.answer_json({"version": VERSION}),
            ("GET", "/load"): lambda exchange: exchange.answer_json({"server_load": 0}),
            ("GET", "/v1/models"): self._models,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
            ("POST", "/inference/v1/abort_requests"): self._abort_scale_out,
            ("POST", "/v1/load_lora_adapter"): self._load_lora,
            ("POST", "/v1/unload_lora_adapter"): self._unload_lora,
        }
        dev_mode: dict[tuple[str, str], Handler] = {
            ("GET", "/server_info"): self._server_info,
            ("POST", "/abort_requests"): self._abort,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            ("GET", "/is_paused"): lambda exchange: exchange.answer_json({"is_paused": self._engine.paused}),
            ("POST", "/update_weight_version"): self._update_weight_version,
            ("GET", "/weight_info"): self._weight_info,
            ("POST", "/collective_rpc"): self._collective_rpc,
            ("POST", "/reset_prefix_cache"): self._reset_prefix_cache,
        }
        return always | (dev_mode if self._settings.dev_mode else {})

    # -- what it is and how it does

    def _health(self, exchange: Exchange) -> None:
        exchange.answer(b"", status=503 if self._engine.dead else 200, content_type=None)

    def _models(self, exchange: Exchange) -> None:
        model = self._settings.model
        card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": model,
            "parent": None,
            "max_model_len": self._settings.max_model_len,
            "permission": [],
        }
        exchange.answer_json({"object": "list", "data": [card]})

    def _metrics(self, exchange: Exchange) -> None:
        engine = self._engine
        running, waiting = engine.load
        values = {
            "num_requests_running": running,
            "num_requests_waiting": waiting,
            "kv_cache_usage_perc": min(1.0, engine.cache_tokens() / self._settings.kv_cache_tokens),
            "num_preemptions_total": 0,
            "prompt_tokens_total": engine.prompt_tokens,
            "generation_tokens_total": engine.generated_tokens(),
            "prefix_cache_queries_total": engine.prompt_tokens,
            "prefix_cache_hits_total": engine.cache_hits,
        }
        lines = []
        for name, kind, text in _METRICS:
            lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
            lines.append(f'vllm:{name}{{engine="0",model_name="{self._settings.model}"}} {float(values[name])}')
        page = "\n".join([*lines, ""]).encode()
        exchange.answer(page, content_type="text/plain; version=1.0.0; charset=utf-8")

    def _server_info(self, exchange: Exchange) -> None:
        settings = self._settings
        model_config = {
            "model": settings.model,
            "max_model_len": settings.max_model_len,
            "logprobs_mode": settings.logprobs_mode,
            "served_model_name": settings.model,
        }
        config: Any = {"model_config": model_config}
        if exchange.query.get("config_format", "text") == "text":
            # vLLM's text form names the model and its length, and not the logprobs mode.
            config = f"model={settings.model!r}, max_seq_len={settings.max_model_len}, seed={settings.seed}"
        exchange.answer_json({"vllm_config": config, "vllm_env": {}, "system_env": {}})

    def _tokenize(self, exchange: Exchange) -> None:
        body = _object(exchange)
        if "messages" in body:
            messages = [m for m in _field(body, "messages", list) if isinstance(m, dict)]
            turns = [(str(m.get("role")), str(m.get("content") or "")) for m in messages]
            ids = chat_prompt(turns, generation_prompt=body.get("add_generation_prompt", True))
        else:
            ids = encode_text(_field(body, "prompt", str))
        strings = [SPECIALS.get(i) or decode_ids([i]) for i in ids] if body.get("return_token_strs") else None
        limit = self._settings.max_model_len
        exchange.answer_json({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    def _detokenize(self, exchange: Exchange) -> None:
        tokens = _field(_object(exchange), "tokens", list)
        if not all(isinstance(token, int) for token in tokens):
            raise Refusal(400, "1 validation error: tokens must be integers", kind="Bad Request", param="body.tokens")
        exchange.answer_json({"prompt": decode_ids(tokens, specials=True)})

    # -- aborting and pausing

    def _abort(self, exchange: Exchange) -> None:
        ids = _object(exchange).get("request_ids")
        journal = self._journal
        journal.abort_calls += 1
        # Answered first, as by the real one: whoever aborts a thousand does not wait for their thousand answers.
        if ids:
            names = _strings(ids)
            journal.abort_ids += len(ids)
            exchange.answer_json({"status": "aborted", "aborted": len(ids)})
            self._engine.abort(names)
        else:
            # The trap of the real one: nothing named is everything running.
            journal.empty_abort_calls += 1
            count = self._engine.running + self._engine.waiting
            exchange.answer_json({"status": "aborted", "aborted": count})
            self._engine.abort_all()
        self._changed()

    def _abort_scale_out(self, exchange: Exchange) -> None:
        if not self._settings.scale_out:
            raise no_scale_out()
        ids = _object(exchange).get("request_ids")
        if ids is None:
            raise Refusal(400, "Missing 'request_ids' in request body", kind="Bad Request")
        names = _strings(ids)
        self._journal.abort_calls += 1
        self._journal.abort_ids += len(ids)
        exchange.answer(b"", content_type=None)
        self._engine.abort(names)
        self._changed()

    def _pause(self, exchange: Exchange) -> None:
        query = exchange.query
        try:
            mode = PauseMode(query.get("mode", PauseMode.ABORT))
        except ValueError as problem:
            message = "1 validation error: mode should be 'abort', 'wait' or 'keep'"
            raise Refusal(400, message, kind="Bad Request", param="query.mode") from problem
        clear_cache = query.get("clear_cache", "true").lower() not in ("false", "0")
        self._engine.pause(mode, clear_cache=clear_cache, done=lambda: exchange.answer_json({"status": "paused"}))
        self._changed()

    def _resume(self, exchange: Exchange) -> None:
        self._engine.resume()
        exchange.answer_json({"status": "resumed"})
        self._changed()

    # -- weights

    def _update_weight_version(self, exchange: Exchange) -> None:
        version = _field(_object(exchange), "new_version", str)
        self._engine.set_weight_version(version)
        exchange.answer_json({"success": True, "new_version": version})
        self._changed()

    def _weight_info(self, exchange: Exchange) -> None:
        exchange.answer_json({"weight_version": self._engine.weight_version})

    def _collective_rpc(self, exchange: Exchange) -> None:
        """Accepts every method: there are no weights here to reload."""
        if _object(exchange).get("method") is None:
            raise Refusal(400, "Missing 'method' in request body", kind="Bad Request")
        exchange.answer_json({"results": [None]})

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        exchange.answer_json({"success": self._engine.reset_prefix_cache()})

    def _load_lora(self, exchange: Exchange) -> None:
        body = _object(exchange)
        name = _field(body, "lora_name", str)
        _field(body, "lora_path", str)
        exchange.answer(f"Success: LoRA adapter '{name}' added successfully.".encode(), content_type=None)

    def _unload_lora(self, exchange: Exchange) -> None:
        name = _field(_object(exchange), "lora_name", str)
        exchange.answer(f"Success: LoRA adapter '{name}' removed successfully.".encode(), content_type=None)


def _object(exchange: Exchange) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(exchange.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Refusal(400, "Invalid JSON format", kind="Bad Request") from problem
    if not isinstance(body, dict):
        raise Refusal(400, "Request body must be a JSON object", kind="Bad Request")
    return body


def _field(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        message = f"1 validation error: {name} is required and must be a {kind.__name__}"
        raise Refusal(400, message, kind="Bad Request", param=f"body.{name}")
    return value


def _strings(ids: Any) -> list[str]:
    """The ids of an abort. Like the real one it takes a text for the list of its characters."""
    if not isinstance(ids, list | str):
        raise Refusal(400, "'request_ids' must be a list", kind="Bad Request", param="body.request_ids")
    return [name for name in ids if isinstance(name, str)]
