"""OpenAPI says what is true: bodies, problems, and answers that match it."""

from __future__ import annotations

import asyncio
from typing import Any

import requests
import schemathesis
import schemathesis.specs.openapi.schemas
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from rollout_service.api import build_api
from tests.api.conftest import Service

EXAMPLES = 8
"""Of each operation: enough to meet every kind of refusal, and a few seconds in all."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BODIES = {
    ("/policy_version", "post"): "VersionBody",
    ("/prompts", "post"): "PromptsBody",
    ("/leases", "post"): "LeaseBody",
    ("/leases/{lease_id}/ack", "post"): "LeasePart",
    ("/leases/{lease_id}/release", "post"): "LeasePart",
    ("/leases/{lease_id}/renew", "post"): "RenewBody",
    ("/checkpoints", "post"): "CheckpointBody",
    ("/rewind", "post"): "CheckpointBody",
    ("/engines", "post"): "EngineBody",
}
REACHABLE = {
    ("/prompts", "post"): {"400", "409", "413", "422", "429", "503"},
    ("/leases", "post"): {"400", "409", "413", "422", "503"},
    ("/leases/{lease_id}/ack", "post"): {"400", "404", "409", "413", "422", "503"},
    ("/groups/{group_id}", "delete"): {"404", "409", "503"},
    ("/groups", "get"): {"422", "503"},
    ("/engines", "post"): {"400", "403", "409", "413", "422", "503"},
    ("/engines/{engine_id}", "delete"): {"404", "422", "503"},
    ("/readyz", "get"): {"503"},
}


def document() -> dict[str, Any]:
    return build_api(Service().context).openapi()


def operations() -> dict[tuple[str, str], dict[str, Any]]:
    return {(path, verb): op for path, verbs in document()["paths"].items() for verb, op in verbs.items()}


def test_every_route_declares_its_problems():
    for (path, verb), operation in operations().items():
        answers = operation["responses"]
        assert "default" in answers, (path, verb)
        for status, answer in answers.items():
            if status == "default" or status >= "400":
                schema = answer["content"]["application/problem+json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}, (path, verb, status)
    for key, statuses in REACHABLE.items():
        assert statuses <= operations()[key]["responses"].keys(), key


def test_every_body_is_declared_and_every_reference_leads_somewhere():
    found = {
        key: op["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for key, op in operations().items()
        if "requestBody" in op
    }
    assert found == BODIES
    schemas = document()["components"]["schemas"]
    wanted = [ref.rpartition("/")[2] for ref in _references(document())]
    assert wanted
    assert set(wanted) <= schemas.keys()


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        here = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return here + [ref for child in value.values() for ref in _references(child)]
    return [ref for child in value for ref in _references(child)] if isinstance(value, list) else []


async def test_schemathesis_finds_no_answer_that_breaks_the_document(live: Service):
    schema = schemathesis.openapi.from_dict(live.app.openapi())
    tried = await asyncio.to_thread(_try_everything, schema, f"http://127.0.0.1:{live.port}")
    assert tried == len(operations())
    assert live.door.status().store_ok


def _try_everything(schema: Any, url: str) -> int:
    tried = 0
    with requests.Session() as session:
        for result in schema.get_all_operations():
            _try_operation(result.ok(), url, session)
            tried += 1
    return tried


def _try_operation(operation: Any, url: str, session: requests.Session) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    )
    def run(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and operation.path == "/leases":
            case.body["wait_s"] = 0
        if operation.path == "/events":
            limit = str((case.query or {}).get("limit", "1"))  # without one, or with a large one, it goes on and on
            case.query = {**(case.query or {}), "limit": "2" if limit.isdecimal() and int(limit) > 2 else limit}
        response = case.call(base_url=url, session=session)
        case.validate_response(response, checks=CHECKS)

    run()
