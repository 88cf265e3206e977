"""The JSON of finished calls, shaped as vLLM shapes it.

Always holds: an answer is made of ready slices and a few small encodings, in time that does not depend on Python
loops over tokens. `token_ids`, logprobs and token strings of a choice have the same length; the partial tokens of an
aborted completion are the first ones it would have had. `weight_versions` stand on generate answers only.
"""

from __future__ import annotations

import msgspec

from .bodies import Kind
from .calls import Call, Completion

FINGERPRINT = "vllm-0.32.0-simulated"

_encode = msgspec.json.encode
_COMPLETION, _CHAT, _GENERATE = Kind.COMPLETION, Kind.CHAT, Kind.GENERATE
_PREFIXES = {Kind.COMPLETION: "cmpl", Kind.CHAT: "chatcmpl", Kind.GENERATE: "generate-tokens"}
_COMPLETION_END = (
    b'],"service_tier":null,"system_fingerprint":"%b","usage":%b,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"metrics":null}'
)
_CHAT_END = (
    b'],"service_tier":null,"system_fingerprint":"%b","usage":%b,"prompt_logprobs":null,"prompt_token_ids":%b,'
    b'"prompt_text":null,"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
)
_GENERATE_START = (
    b'{"request_id":%b,"model":%b,"created":%d,"usage":%b,"prompt_logprobs":null,"prompt_token_id_logprobs":null,'
    b'"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,"kv_transfer_params":null,'
    b'"ec_transfer_params":null,"output_mode":"tokens","choices":['
)


def answer_id(call: Call) -> str:
    """The answer's own id. For completions it is not the one to abort by."""
    return f"{_PREFIXES[call.ask.kind]}-{call.request_id}"


def abort_ids(kind: Kind, request_id: str, prompts: int) -> list[str]:
    """The ids to abort by, one for each prompt."""
    if kind is _COMPLETION:
        return [f"cmpl-{request_id}-{row}" for row in range(prompts)]
    return [f"chatcmpl-{request_id}" if kind is _CHAT else f"generate-tokens-{request_id}"] * prompts


def whole_answer(call: Call, *, model: str, created: int) -> bytes:
    """The body of a call that has ended; `created` is in Unix seconds."""
    ask = call.ask
    name, model_json = _encode(answer_id(call)), _encode(model)
    usage = _usage_json(call)
    if ask.kind is _GENERATE:
        choices = b",".join([_generate_choice(i, c) for i, c in enumerate(call.completions)])
        return _GENERATE_START % (name, model_json, created, usage) + choices + b"]}"
    fingerprint = FINGERPRINT.encode()
    if ask.kind is _CHAT:
        head = b'{"id":%b,"object":"chat.completion","created":%d,"model":%b,"choices":['
        choices = b",".join([_chat_choice(i, c) for i, c in enumerate(call.completions)])
        prompt = _encode(ask.prompts[0]) if ask.wants_ids else b"null"
        return head % (name, created, model_json) + choices + _CHAT_END % (fingerprint, usage, prompt)
    head = b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":['
    prompts = [_encode(ids) for ids in ask.prompts] if ask.wants_ids else [b"null"] * len(ask.prompts)
    choices = b",".join([_completion_choice(i, c, prompts[i // ask.n]) for i, c in enumerate(call.completions)])
    return head % (name, created, model_json) + choices + _COMPLETION_END % (fingerprint, usage)


def usage(call: Call) -> dict[str, int]:
    """Tokens of a call that has ended: prompts once each, however many completions."""
    prompt = sum(map(len, call.ask.prompts))
    completion = call.record.tokens
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def tokens_json(completion: Completion, start: int, stop: int, *, base: int = 0) -> tuple[bytes, bytes]:
    """(ids, logprobs) of tokens start..stop, null where the call does not want them; text offsets count from `base`."""
    content, ask = completion.content, completion.call.ask
    ring = content.ring
    if not ask.wants_logprobs:
        return b"[%b]" % content.fragments((ring.ids,), start, stop)[0] if ask.wants_ids else b"null", b"null"
    if ask.kind is _COMPLETION:
        ids, values, strings, tops = content.fragments(ring.completion_columns, start, stop)
        logprobs = b'{"text_offset":%b,"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
            _encode(content.text_offsets(start, stop, base)),
            values,
            strings,
            tops,
        )
    else:
        entries = ring.chat_entries if ask.kind is _CHAT else ring.generate_entries
        ids, inner = content.fragments((ring.ids, entries), start, stop)
        logprobs = b'{"content":[%b]}' % inner
    return b"[%b]" % ids if ask.wants_ids else b"null", logprobs


def versions_json(completion: Completion) -> bytes:
    """Spans of tokens by the weights that made them; weights that made none are left out."""
    ends = [start for _, start in completion.versions[1:]] + [completion.decoded]
    spans = [
        {"version": version, "start": start, "end": end}
        for (version, start), end in zip(completion.versions, ends, strict=True)
        if end > start
    ]
    return _encode(spans)


def _text(completion: Completion) -> bytes:
    return _encode(completion.content.raw(0, completion.decoded).decode("utf-8", "replace"))


def _completion_choice(index: int, completion: Completion, prompt_ids: bytes) -> bytes:
    ids, logprobs = tokens_json(completion, 0, completion.decoded)
    return (
        b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":null,"token_ids":%b,'
        b'"prompt_logprobs":null,"prompt_token_ids":%b,"routed_experts":null}'
    ) % (index, _text(completion), logprobs, _encode(completion.finish_reason), ids, prompt_ids)


def _chat_choice(index: int, completion: Completion) -> bytes:
    ids, logprobs = tokens_json(completion, 0, completion.decoded)
    return (
        b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null,"annotations":null,"audio":null,'
        b'"function_call":null,"reasoning":null},"logprobs":%b,"finish_reason":%b,"stop_reason":null,'
        b'"token_ids":%b,"routed_experts":null}'
    ) % (index, _text(completion), logprobs, _encode(completion.finish_reason), ids)


def _generate_choice(index: int, completion: Completion) -> bytes:
    ids, logprobs = tokens_json(completion, 0, completion.decoded)
    return (
        b'{"index":%d,"finish_reason":%b,"stop_reason":null,"token_ids":%b,"routed_experts":null,'
        b'"sampling_mask":null,"weight_versions":%b,"logprobs":%b}'
    ) % (index, _encode(completion.finish_reason), ids, versions_json(completion), logprobs)


def _usage_json(call: Call) -> bytes:
    prompt, completion = sum(map(len, call.ask.prompts)), call.record.tokens
    return (
        b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null,'
        b'"completion_tokens_details":null}'
    ) % (prompt, prompt + completion, completion)
