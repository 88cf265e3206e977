"""Whether the client and an OpenAPI document understand each other.

Nothing is listed here that the document or the client says itself: every call of the client is run, what it sends is
checked against the document, and it is given answers made from the document's schemas. Only what one side has and the
other does not use is named, with its reason.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import jsonschema_rs
import msgspec

from trainer_client import Lease, LeaseStatus, RolloutClient, UnexpectedAnswer
from trainer_client.core import Core, Pause, Request, Response

PROMPTS = [
    {"messages": [{"role": "user", "content": "hello"}], "prompt_id": "p1", "epoch": 0, "columns": {"answer": 42}},
    {"prompt": "hello", "num_generations": 4, "sampling": {"temperature": 0.7}},
    {"prompt_token_ids": [1, 2, 3]},
]
LEASE = Lease(status=LeaseStatus.OK, lease_id="lease/1", policy_version=0)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("post_version", {"version": 3, "reset": True}),
    ("post_version", {"version": 3, "weights": "/models/step-3", "load_timeout_s": 60.0}),
    ("post_version", {"version": 3, "lora": ("step-3", "/models/step-3")}),
    ("version", {}),
    ("submit", {"prompts": PROMPTS, "final": True}),
    ("submit", {"prompts": [{"prompt": "hello"}], "final": False}),
    ("lease", {"max_groups": 8, "min_groups": 2, "wait_s": 0, "lease_s": 60, "consumer": "r0", "request_id": "step-1"}),
    ("lease", {}),
    ("ack", {"lease": LEASE, "group_ids": None}),
    ("ack", {"lease": "lease-1", "group_ids": ["g-1"]}),
    ("release", {"lease": LEASE, "group_ids": None}),
    ("release", {"lease": "lease-1", "group_ids": ["g-1"]}),
    ("renew", {"lease": LEASE}),
    ("status", {}),
    ("group", {"group_id": "g-1"}),
    ("groups", {"state": "ready", "limit": 10, "after": "g-1"}),
    ("cancel", {"group_id": "g-1"}),
    ("pause", {}),
    ("resume", {}),
    ("engines", {}),
    ("add_engine", {"url": "http://10.0.0.7:8000", "max_inflight": 64}),
    ("add_engine", {"url": "http://10.0.0.7:8000", "max_inflight": "auto"}),
    ("add_engine", {"url": "http://10.0.0.7:8000"}),
    ("remove_engine", {"id": "e1", "drain_s": 60}),
    ("metrics", {}),
    ("create_checkpoint", {"name": "step-1"}),
    ("checkpoints", {}),
    ("delete_checkpoint", {"name": "step-1"}),
    ("rewind", {"name": "step-1"}),
]
"""Every call of the client, every parameter in one of its lines."""

UNUSED_ROUTES = {
    ("get", "/livez"): "for whoever runs the service, not for a trainer",
    ("get", "/readyz"): "the same",
    ("get", "/live"): "for people: the page, `top` and scripts",
    ("get", "/events"): "the same",
    ("get", "/groups/{group_id}/samples"): "the same; a trainer has them in its lease",
    ("get", "/"): "the page",
    ("get", "/page/{name}"): "the page",
}
"""Routes no call of the client uses -> why."""
UNSAID_MEMBERS = {
    "GroupInfo.facts": "the whole answer",
    "GroupPage.next_after": "the last group of the page, which the answer calls `next`",
}
"""Members of the client's values that no answer has -> why."""

Document = dict[str, Any]


def disagreements(document: Document) -> list[str]:
    """One line for each thing the client would send or read that the document does not have, and the reverse."""
    found, used = list(_calls_without_an_example()), set()
    for name, arguments in CALLS:
        request = _first_request(name, arguments)
        route = _route(document, request)
        if route is None:
            found.append(f"{name}: there is no {request.method} {request.path}")
            continue
        used.add(route)
        found += [f"{name}: {what}" for what in _sent(document, route, request)]
        found += [f"{name}: {what}" for what in _read(document, route, name, arguments)]
    there = {(verb, path) for path, verbs in document["paths"].items() for verb in verbs}
    listed = UNUSED_ROUTES.keys()
    found += [f"no call uses {verb.upper()} {path}" for verb, path in sorted(there - used - listed)]
    found += [f"listed as unused: {verb.upper()} {path}" for verb, path in sorted((listed - there) | (used & listed))]
    return list(dict.fromkeys(found))


def _calls_without_an_example() -> Iterator[str]:
    for name, call in vars(RolloutClient).items():
        if getattr(call, "__wrapped__", None) is not getattr(Core, name, object()):
            continue
        given = {key for called, arguments in CALLS if called == name for key in arguments}
        if name not in dict(CALLS):
            yield f"{name}: no example of this call"
        for parameter in [*inspect.signature(call).parameters][1:]:
            if parameter not in given:
                yield f"{name}: no example with its parameter {parameter}"


def _first_request(name: str, arguments: dict[str, Any]) -> Request:
    request = next(_flow(name, arguments))
    assert isinstance(request, Request)
    return request


def _flow(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(Core(timeout_s=1, retry_for_s=0, consumer=None), name)(**arguments)


def _route(document: Document, request: Request) -> tuple[str, str] | None:
    """The verb and path template of the document that this request meets."""
    parts = [unquote(part) for part in urlsplit(request.path).path.split("/")]
    verb = request.method.lower()
    for template, verbs in document["paths"].items():
        wanted = template.split("/")
        alike = len(wanted) == len(parts) and all(
            want == part or want.startswith("{") for want, part in zip(wanted, parts, strict=True)
        )
        if alike and verb in verbs:
            return verb, template
    return None


# what is sent


def _sent(document: Document, route: tuple[str, str], request: Request) -> Iterator[str]:
    operation = document["paths"][route[1]][route[0]]
    query = parse_qs(urlsplit(request.path).query)
    parameters = {p["name"]: p for p in operation.get("parameters", []) if p["in"] == "query"}
    for name in sorted(query.keys() - parameters.keys()):
        yield f"sends ?{name}, which is no parameter"
    for name, parameter in parameters.items():
        if parameter.get("required") and name not in query:
            yield f"does not send ?{name}"
    yield from _body(document, operation, request)
    if request.accept is not None:
        answers = _success(operation).get("content", {})
        for accepted in request.accept.split(","):
            if accepted.partition(";")[0].strip() not in answers:
                yield f"accepts {accepted.strip()}, which is never sent"


def _body(document: Document, operation: dict[str, Any], request: Request) -> Iterator[str]:
    declared = operation.get("requestBody")
    if request.body is None:
        if declared is not None and declared.get("required"):
            yield "sends no body"
        return
    if declared is None:
        yield "sends a body, and none is declared"
        return
    schema, body = declared["content"]["application/json"]["schema"], json.loads(request.body)
    for name in body.keys() - _resolved(document, schema).get("properties", {}).keys():
        yield f"sends {name}, which is no member"
    validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
    for error in validator.iter_errors(body):
        yield f"sends {'/'.join(str(part) for part in error.instance_path) or 'a body'}: {error.message}"


def _resolved(document: Document, schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


# what is read


def _success(operation: dict[str, Any]) -> dict[str, Any]:
    status = min(status for status in operation["responses"] if status.startswith("2"))
    answer: dict[str, Any] = operation["responses"][status]
    return answer


def _read(document: Document, route: tuple[str, str], name: str, arguments: dict[str, Any]) -> Iterator[str]:
    operation = document["paths"][route[1]][route[0]]
    schema = _success(operation).get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        yield from _given(name, arguments, None, full=True)
        return
    for number in range(_most_choices(document, schema)):
        for full in (True, False):
            yield from _given(name, arguments, _Examples(document, number, full).of(schema), full)


def _given(name: str, arguments: dict[str, Any], answer: Any, full: bool) -> Iterator[str]:
    """What is wrong when the call gets this answer (None: no JSON), which has every optional member if `full`."""
    flow = _flow(name, arguments)
    next(flow)
    content = b"" if answer is None else json.dumps(answer).encode()
    try:
        more = flow.send(Response(status=200, content=content, content_type="application/json"))
    except StopIteration as end:
        yield from _compared(end.value, answer, full)
    except UnexpectedAnswer as error:
        yield f"cannot read what the document allows: {error}"
    else:
        assert not isinstance(more, Pause)
        yield f"asks for {more.path} after a success"


def _compared(value: Any, answer: Any, full: bool) -> Iterator[str]:
    """Members of the client's value that the answer lacks although it is full, or has with another value."""
    if isinstance(value, list):
        answer = answer["groups"] if isinstance(answer, dict) and "groups" in answer else answer
        if isinstance(answer, list):
            for one, other in zip(value, answer, strict=True):
                yield from _compared(one, other, full)
    if not isinstance(value, msgspec.Struct):
        return
    for field in msgspec.structs.fields(value):
        member = f"{type(value).__name__}.{field.name}"
        mine = getattr(value, field.encode_name)
        if field.encode_name in answer and member in UNSAID_MEMBERS:
            yield f"{member} is listed as being in no answer"
        elif field.encode_name not in answer:
            if full and member not in UNSAID_MEMBERS:
                yield f"{member} is in no answer"
        elif isinstance(mine, msgspec.Struct | list):
            yield from _compared(mine, answer[field.encode_name], full)
        elif mine != answer[field.encode_name]:
            yield f"{member} is {mine!r} where the answer has {answer[field.encode_name]!r}"


def _most_choices(document: Document, schema: Any) -> int:
    """The length of the longest list of alternatives in a schema, at least 2 (for true and false)."""
    if isinstance(schema, dict):
        schema = _resolved(document, schema)
        here = [len(schema[key]) for key in ("anyOf", "enum") if key in schema]
        return max([2, *here, *(_most_choices(document, child) for child in schema.values())])
    if isinstance(schema, list):
        return max([2, *(_most_choices(document, child) for child in schema)])
    return 2


class _Examples:
    """Values that a schema allows: alternative `number` wherever there is a choice, optional members if `full`."""

    def __init__(self, document: Document, number: int, full: bool) -> None:
        self._document, self._number, self._full = document, number, full

    def of(self, schema: dict[str, Any]) -> Any:
        schema = _resolved(self._document, schema)
        for choice in ("anyOf", "enum"):
            if choice in schema:
                chosen = schema[choice][self._number % len(schema[choice])]
                return self.of(chosen) if choice == "anyOf" else chosen
        if "const" in schema:
            return schema["const"]
        match schema.get("type"):
            case "object":
                return self._object(schema)
            case "array":
                return [self.of(schema.get("items", {}))]
            case "integer":
                return int(schema.get("minimum", 3))
            case "number":
                return 1.5
            case "boolean":
                return bool(self._number % 2)
            case "null":
                return None
            case "string":
                return "text"
            case None:
                return {"any": ["thing"]}
        raise AssertionError(f"no example of {schema}")

    def _object(self, schema: dict[str, Any]) -> dict[str, Any]:
        properties = schema.get("properties", {})
        names = properties if self._full else schema.get("required", [])
        made = {name: self.of(properties[name]) for name in names}
        if not properties and schema.get("additionalProperties"):
            more = schema["additionalProperties"]
            key = self.of(schema["propertyNames"]) if "propertyNames" in schema else "key"
            made[key] = self.of(more if isinstance(more, dict) else {})
        return made
