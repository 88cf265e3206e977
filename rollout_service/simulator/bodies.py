"""What a caller asks: the three request bodies, read and checked as vLLM does, brought into one shape.

Always holds: an `Ask` is servable: every prompt is non-empty, within the vocabulary and leaves room for at least one
token, and `limits` says for each prompt how many tokens fit. Everything else is a `Refusal` with vLLM's status,
message and `param`. Unknown fields are ignored. Stop strings, penalties and top-k alternatives are accepted and not
modelled.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from .content import LONGEST_TOKEN, VOCABULARY, chat_prompt, decode_ids, encode_text
from .settings import SimulatorSettings

DEFAULT_MAX_TOKENS = 16
"""Of `/v1/completions`; the other two fill what is left of the context."""
MAX_LOGPROBS = 20


class Kind(StrEnum):
    """Which of the three generation routes."""

    COMPLETION = "/v1/completions"
    """Text or token ids, or batches of them."""
    CHAT = "/v1/chat/completions"
    """Messages through the chat template."""
    GENERATE = "/inference/v1/generate"
    """Tokens in, tokens out; needs scale-out."""


class Refusal(Exception):
    """The answer to a request that is not served: vLLM's error object."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in the same shape for all routes."""

    kind: Kind
    request_id: str | None
    """The body's own; the X-Request-Id header wins over it."""
    prompts: list[list[int]]
    limits: list[int]
    """Most tokens each prompt's completions may have."""
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    wants_ids: bool = False
    wants_logprobs: bool = False
    stream: bool = False
    include_usage: bool = False

    def prompt_text(self) -> str:
        """All prompts as text, special tokens shown: what fault rules match."""
        return "\n".join(decode_ids(ids, specials=True) for ids in self.prompts)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Sampling(msgspec.Struct, kw_only=True):
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    logprobs: int | bool | None = None
    ignore_eos: bool = False


class _Common(_Sampling, kw_only=True):
    model: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[Any] | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[Any] | None = None


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True


class _Generate(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: _Sampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)
_CHAT = msgspec.json.Decoder(_Chat)
_GENERATE = msgspec.json.Decoder(_Generate)
_Body = TypeVar("_Body")


def read(kind: Kind, body: bytes, settings: SimulatorSettings) -> Ask:
    """The request in `body`; raises `Refusal`."""
    if kind is Kind.COMPLETION:
        return _read_completion(_decode(_COMPLETION, body), settings)
    if kind is Kind.CHAT:
        return _read_chat(_decode(_CHAT, body), settings)
    return _read_generate(_decode(_GENERATE, body), settings)


def _read_completion(body: _Completion, settings: SimulatorSettings) -> Ask:
    _check_model(body.model, settings)
    given = _check_sampling(body, body.max_tokens, default=DEFAULT_MAX_TOKENS)
    prompts = [_tokenized(prompt, settings) for prompt in _batch(body.prompt)]
    return Ask(
        kind=Kind.COMPLETION,
        request_id=body.request_id,
        prompts=prompts,
        limits=[_limit(ids, given, settings) for ids in prompts],
        n=body.n or 1,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        wants_ids=bool(body.return_token_ids),
        wants_logprobs=body.logprobs is not None and body.logprobs is not False,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _read_chat(body: _Chat, settings: SimulatorSettings) -> Ask:
    _check_model(body.model, settings)
    given = _check_sampling(body, body.max_completion_tokens or body.max_tokens, default=None)
    turns = [(message.role, _text(message.content)) for message in body.messages]
    if not turns:
        raise Refusal(400, "messages must not be empty", param="messages")
    _check_characters(sum(len(content) for _, content in turns), settings)
    ids = chat_prompt(turns, generation_prompt=body.add_generation_prompt)
    _check_length(len(ids), settings, exact=False)
    return Ask(
        kind=Kind.CHAT,
        request_id=body.request_id,
        prompts=[ids],
        limits=[_limit(ids, given, settings)],
        n=body.n or 1,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        wants_ids=bool(body.return_token_ids),
        wants_logprobs=bool(body.logprobs),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _read_generate(body: _Generate, settings: SimulatorSettings) -> Ask:
    _check_model(body.model, settings)
    sampling = body.sampling_params
    given = _check_sampling(sampling, sampling.max_tokens, default=None)
    ids = body.token_ids
    if not ids:
        raise Refusal(400, "token_ids must not be empty", kind="Bad Request", param="body.token_ids")
    _check_vocabulary(ids)
    if len(ids) > settings.max_model_len:
        # Unlike the other two routes this one names no parameter.
        raise Refusal(
            400,
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
            f"{settings.max_model_len}. Make sure that `max_model_len` is no smaller than the number of text tokens.",
        )
    return Ask(
        kind=Kind.GENERATE,
        request_id=body.request_id,
        prompts=[ids],
        limits=[_limit(ids, given, settings)],
        n=sampling.n or 1,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        wants_ids=True,
        wants_logprobs=sampling.logprobs is not None and sampling.logprobs is not False,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _decode(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as problem:
        _, _, place = str(problem).partition(" - at `$.")
        raise Refusal(
            400,
            f"1 validation error:\n  {problem}",
            kind="Bad Request",
            param=f"body.{place.rstrip('`')}" if place else "body",
        ) from problem
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Refusal(400, f"JSON decode error: {problem}", kind="Bad Request", param="body") from problem


def _check_model(model: str | None, settings: SimulatorSettings) -> None:
    if model is not None and model != settings.model:
        message = f"The model `{model}` does not exist. Valid aliases: {settings.model}."
        raise Refusal(404, message, kind="NotFoundError", param="model")


def _check_sampling(sampling: _Sampling, max_tokens: int | None, *, default: int | None) -> int | None:
    if sampling.n is not None and sampling.n < 1:
        raise Refusal(400, f"n must be at least 1, got {sampling.n}.")
    if sampling.temperature is not None and sampling.temperature < 0:
        raise _bad(
            "temperature", f"temperature must be non-negative, got {sampling.temperature}.", sampling.temperature
        )
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise _bad("top_p", f"top_p must be in (0, 1], got {sampling.top_p}.", sampling.top_p)
    if sampling.logprobs is not None and sampling.logprobs > MAX_LOGPROBS:
        message = f"Requested sample logprobs of {sampling.logprobs}, which is greater than max allowed: {MAX_LOGPROBS}"
        raise _bad("logprobs", message, sampling.logprobs)
    if max_tokens is None:
        return default
    if max_tokens < 1:
        raise _no_room(max_tokens)
    return max_tokens


def _batch(prompt: str | list[Any] | None) -> list[Any]:
    """The prompts of a completion request: one text, one list of ids, or a list of either."""
    if prompt is None or prompt == "":
        message = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
        raise Refusal(400, message, param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise Refusal(400, "You must pass at least one prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _tokenized(prompt: Any, settings: SimulatorSettings) -> list[int]:
    if isinstance(prompt, str) and prompt:
        _check_characters(len(prompt), settings)
        ids = encode_text(prompt)
        _check_length(len(ids), settings, exact=False)
        return ids
    if not isinstance(prompt, list) or not prompt or set(map(type, prompt)) != {int}:
        raise Refusal(400, "a prompt is a text or a list of token ids", kind="Bad Request", param="body.prompt")
    _check_length(len(prompt), settings, exact=True)
    _check_vocabulary(prompt)
    return prompt


def _check_vocabulary(ids: list[int]) -> None:
    if max(ids) >= VOCABULARY or min(ids) < 0:
        bad = next(i for i in ids if not 0 <= i < VOCABULARY)
        raise Refusal(400, f"Token id {bad} is out of vocabulary")


def _check_characters(characters: int, settings: SimulatorSettings) -> None:
    """A text that cannot fit is refused before it is tokenized, under another parameter name."""
    limit = settings.max_model_len * LONGEST_TOKEN
    if characters > limit:
        raise _bad(
            "input_text",
            f"This model's maximum context length is {settings.max_model_len} tokens. However, your prompt contains "
            f"{characters} characters (more than {limit} characters, which is the upper bound for "
            f"{settings.max_model_len} input tokens). Please reduce the length of the input prompt.",
            characters,
        )


def _check_length(tokens: int, settings: SimulatorSettings, *, exact: bool) -> None:
    """`exact` is false for texts: their tokenizing stops one past the limit."""
    limit = settings.max_model_len
    if tokens > limit:
        shown, least = (tokens, "") if exact else (limit + 1, "at least ")
        raise _bad(
            "input_tokens",
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {least}{shown} "
            f"input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt.",
            shown,
        )


def _limit(ids: list[int], max_tokens: int | None, settings: SimulatorSettings) -> int:
    """Over the limit together is silently cut; a prompt that leaves no room is refused as if it had asked for 0."""
    room = settings.max_model_len - len(ids)
    if room < 1:
        raise _no_room(0)
    return room if max_tokens is None else min(room, max_tokens)


def _text(content: str | list[Any] | None) -> str:
    """A message's content: a text, or the text parts of a list."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, dict))


def _no_room(max_tokens: int) -> Refusal:
    return _bad("max_tokens", f"max_tokens must be at least 1, got {max_tokens}.", max_tokens)


def _bad(parameter: str, message: str, value: object) -> Refusal:
    return Refusal(400, f"{message} (parameter={parameter}, value={value})", param=parameter)
