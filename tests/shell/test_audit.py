"""What `make check` makes of pip-audit's answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests import audit

FAULT = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"]}


def package(name: str, *vulns: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1.0", "vulns": list(vulns)}


def test_a_known_fault_fails_and_says_what_mends_it():
    status, lines = audit.judge({"dependencies": [package("a"), package("b", FAULT)]})
    assert status == 1
    assert lines == ["b 1.0: PYSEC-1: fixed in: 2.0", "pip-audit: 2 of 2 packages checked"]


def test_an_answered_fault_passes_with_its_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit, "ANSWERED", {"CVE-1": "we never call it"})
    status, lines = audit.judge({"dependencies": [package("b", FAULT)]})
    assert status == 0
    assert lines[0] == "b 1.0: PYSEC-1: answered: we never call it"


def test_nothing_checked_is_said_aloud_and_not_called_clean():
    status, lines = audit.judge({"dependencies": [{"name": "a", "skip_reason": "not found"}]})
    assert status == 0
    assert lines == ["pip-audit: NOTHING WAS CHECKED: no advisory could be had for any of 1 packages"]
