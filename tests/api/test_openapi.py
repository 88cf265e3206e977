"""OpenAPI says what is true: bodies, problems, and answers that match it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from starlette.testclient import TestClient

from rollout_service.api import Context, build_api
from rollout_service.metrics import Metrics
from tests.api.conftest import Fleet, Service, settings_with

BODIES = {
    ("/policy_version", "post"): "VersionBody",
    ("/prompts", "post"): "PromptsBody",
    ("/leases", "post"): "LeaseBody",
    ("/leases/{lease_id}/ack", "post"): "LeasePart",
    ("/leases/{lease_id}/release", "post"): "LeasePart",
    ("/leases/{lease_id}/renew", "post"): "RenewBody",
}
REACHABLE = {
    ("/prompts", "post"): {"400", "409", "413", "422", "429", "503"},
    ("/leases", "post"): {"400", "409", "413", "422", "503"},
    ("/leases/{lease_id}/ack", "post"): {"400", "404", "409", "413", "422", "503"},
    ("/groups/{group_id}", "delete"): {"404", "409", "503"},
    ("/groups", "get"): {"422", "503"},
    ("/readyz", "get"): {"503"},
}


def document() -> dict[str, Any]:
    context = Context(settings=settings_with(), orchestrator=Service().door, fleet=Fleet(), metrics=Metrics())
    return build_api(context).openapi()


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


@pytest.fixture
def api_schema() -> Any:
    service = Service()

    class Loop:
        """Starts the orchestrator on the loop the test client runs the app on."""

        async def __aenter__(self) -> None:
            await service.door.start()

        async def __aexit__(self, *_: object) -> None:
            await service.door.stop()

    app = build_api(
        Context(settings=service.settings, orchestrator=service.door, fleet=service.fleet, metrics=service.metrics),
        lifespan=lambda _: Loop(),
    )
    with TestClient(app) as client:
        schema = schemathesis.openapi.from_dict(app.openapi())
        yield schema, client


def test_schemathesis_finds_no_answer_that_breaks_the_document(api_schema: Any):
    schema, client = api_schema
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @schemathesis.pytest.given_case(operation) if hasattr(schemathesis.pytest, "given_case") else _given(operation)
        def run(case: Any) -> None:
            if isinstance(case.body, dict) and "wait_s" in case.body:
                case.body["wait_s"] = 0
            response = client.request(**case.as_transport_kwargs(base_url="http://testserver"))
            case.validate_response(
                response, checks=[not_a_server_error, response_schema_conformance, content_type_conformance]
            )

        run()
        tried.add(operation.label)
    assert len(tried) == len(operations())


def _given(operation: Any) -> Any:
    from hypothesis import given

    return given(case=operation.as_strategy())
