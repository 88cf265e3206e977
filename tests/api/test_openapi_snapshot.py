"""Client and service are bound to one OpenAPI document: a change of either that the other would notice fails here."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api import openapi_snapshot
from tests.api.client_in_schema import disagreements
from tests.api.openapi_snapshot import COMMAND, SNAPSHOT, agreed, differences, text
from tests.api.test_openapi import document
from trainer_client.binary import MEDIA_TYPE

ROOT = Path(__file__).resolve().parents[2]


def test_the_service_is_the_one_that_was_agreed_on():
    found = differences(document())
    if found:
        pytest.fail(f"{found}\n\nthe OpenAPI document has changed; if that is meant: {COMMAND}", pytrace=False)


def test_the_client_sends_and_reads_what_was_agreed_on():
    found = disagreements(agreed())
    if found:
        pytest.fail("\n".join(["client and document disagree:", *found]), pytrace=False)


# and they would notice


def test_a_difference_shows_what_changed_and_in_which_schema():
    changed = agreed()
    changed["components"]["schemas"]["LeaseBody"]["properties"].pop("min_groups")
    found = differences(changed).splitlines()
    assert "- components.schemas.LeaseBody.properties.min_groups.maximum: 1024" in found
    assert {line[0] for line in found} == {"-"}


def test_the_file_is_in_the_form_the_command_writes(tmp_path, monkeypatch):
    assert text(agreed()) == SNAPSHOT.read_text()
    monkeypatch.setattr(openapi_snapshot, "SNAPSHOT", tmp_path / "openapi.json")
    monkeypatch.setattr(sys, "argv", ["openapi_snapshot", "--write"])
    with pytest.raises(SystemExit) as ended:
        openapi_snapshot.main()
    assert ended.value.code == 0
    assert (tmp_path / "openapi.json").read_text() == text(document())
    assert differences(document()) == ""


def test_the_command_runs_and_says_by_its_status_whether_anything_changed():
    module = COMMAND.removeprefix("python -m ").partition(" ")[0]
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (1 if differences(document()) else 0), done.stderr


Change = Callable[[dict[str, Any]], Any]


def schema(name: str, change: Change) -> Change:
    return lambda document: change(document["components"]["schemas"][name])


def without(member: str) -> Change:
    def change(schema: dict[str, Any]) -> None:
        schema["properties"].pop(member)
        schema["required"] = [name for name in schema.get("required", []) if name != member]

    return change


def with_type(member: str, **of: Any) -> Change:
    return lambda schema: schema["properties"].update({member: of})


@functools.cache
def known_disagreements() -> frozenset[str]:
    """None, as long as the test above passes."""
    return frozenset(disagreements(agreed()))


def requires_more(schema: dict[str, Any]) -> None:
    schema["properties"]["reason"] = {"type": "string"}
    schema["required"] = [*schema.get("required", []), "reason"]


def contents(document: dict[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = document["paths"][path]["post"]["responses"]["200"]["content"]
    return found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (schema("LeaseBody", without("min_groups")), "lease: sends min_groups"),
        (schema("PromptRow", without("epoch")), "submit: sends prompts/0"),
        (schema("LeaseBody", with_type("wait_s", type="string")), "lease: sends wait_s"),
        (schema("CheckpointBody", requires_more), "rewind: sends a body: "),
        (schema("LeaseAnswer", without("outstanding")), "lease: Lease.outstanding is in no answer"),
        (schema("LeaseAnswer", without("policy_version")), "lease: cannot read"),
        (schema("SampleAnswer", without("truncated")), "lease: Sample.truncated is in no answer"),
        (schema("SampleAnswer", without("input_ids")), "lease: cannot read"),
        (schema("StatusAnswer", with_type("submitted", type="string")), "status: cannot read"),
        (
            schema("SlotsAnswer", with_type("free", anyOf=[{"type": "integer"}, {"type": "null"}])),
            "status: cannot read",
        ),
        (
            schema("LeaseAnswer", with_type("status", type="string", enum=["ok", "empty", "later"])),
            "lease: cannot read",
        ),
        (schema("GroupAnswer", lambda schema: schema["required"].remove("staleness")), "lease: cannot read"),
        (schema("GroupRow", without("state")), "groups: cannot read"),
        (schema("CheckpointsAnswer", without("checkpoints")), "checkpoints: cannot read"),
        (lambda document: document["paths"].pop("/rewind"), "rewind: there is no POST /rewind"),
        (lambda document: document["paths"]["/groups/{group_id}"].pop("delete"), "cancel: there is no DELETE /groups"),
        (lambda document: document["paths"]["/groups"]["get"]["parameters"].clear(), "groups: sends ?after"),
        (lambda document: document["paths"].update({"/new": {"post": {}}}), "no call uses POST /new"),
        (lambda document: document["paths"].pop("/livez"), "listed as unused: GET /livez"),
        (
            lambda document: contents(document, "/leases").pop(MEDIA_TYPE),
            f"lease: accepts {MEDIA_TYPE}",
        ),
    ],
)
def test_a_change_that_the_client_would_notice_is_named(change, named):
    changed = agreed()
    change(changed)
    new = set(disagreements(changed)) - known_disagreements()
    assert any(named in line for line in new), new
