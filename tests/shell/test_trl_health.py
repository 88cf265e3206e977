"""Why TRL gets no rows, in words: every verdict of check_health on a hand-moved clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import Fault, ScriptedService
from trainer_client import RolloutClient, ServiceUnreachable
from trainer_client.trl import Exhausted, NoProgress
from trainer_client.trl.health import Condition, Watch


def status(**more: Any) -> dict[str, Any]:
    return {
        "policy_version": 3, "submitted": 20, "groups": {"generating": 2, "leased": 1, "ready": 0}, "outstanding": 3,
        "slots": {"total": 8, "used": 3, "free": 5}, "paused": False, "halted": None, "blocked": None, "final": False,
        "engines": [],
    } | more  # fmt: skip


class Patient:
    """A watch, its clock, and what the service says next."""

    def __init__(self, service: ScriptedService) -> None:
        self.service, self.now = service, 1000.0
        self.client = RolloutClient(service.url, retry_for_s=0)
        self.watch = Watch(client=self.client, url=service.url, unreachable_after_s=120, clock=lambda: self.now)

    def check(
        self, answer: dict[str, Any] | None = None, *, delivered: int = 0, spent: int = 0, **condition: Any
    ) -> None:
        if answer is not None:
            self.service.faults.append(Fault("/status", answer=lambda: web.json_response(answer)))
        self.watch.check(Condition(**condition), delivered=delivered, spent=spent, stale_after_s=300)


@pytest.fixture
def patient() -> Iterator[Patient]:
    service = ScriptedService().start()
    patient = Patient(service)
    yield patient
    patient.client.close()
    service.stop()


def test_nothing_changing_for_too_long_is_told_with_what_stands_in_the_way(patient):
    engine = {"id": "e0", "url": "http://gpu:8000", "healthy": False, "error": "connection refused", "in_flight": 0}
    stuck = status(blocked="max_ready_groups", engines=[engine])
    patient.check(stuck)
    patient.now += 300
    patient.check(stuck)
    patient.now += 1
    with pytest.raises(NoProgress) as raised:
        patient.check(stuck)
    said = str(raised.value)
    for part in ("301 s", "blocked by max_ready_groups", "generating 2", "3 of 8 used", "http://gpu:8000",
                 "connection refused", "heartbeat_stale_after_s"):  # fmt: skip
        assert part in said
    assert "ready 0" not in said


@pytest.mark.parametrize(
    "change",
    [
        {"groups": {"generating": 1, "leased": 1, "scoring": 1}},
        {"slots": {"total": 8, "used": 2, "free": 6}},
        {"submitted": 21},
        {"policy_version": 4},
    ],
)
def test_whatever_changes_at_the_service_is_progress(patient, change):
    patient.check(status())
    patient.now += 200
    patient.check(status(**change))
    patient.now += 200
    patient.check(status(**change))


def test_rows_delivered_between_are_progress(patient):
    patient.check(status(), delivered=8)
    patient.now += 400
    patient.check(status(), delivered=16)


def test_a_pace_too_narrow_for_trl_is_explained(patient):
    patient.check(status(blocked="pace"))
    patient.now += 301
    with pytest.raises(NoProgress, match="one micro-batch beyond its step"):
        patient.check(status(blocked="pace"))


def test_a_paused_service_is_no_failure_and_is_said(patient, caplog):
    with caplog.at_level(logging.WARNING, "trainer_client"):
        for _ in range(4):
            patient.check(status(paused=True))
            patient.now += 301
    assert "is paused; POST /resume" in caplog.text
    patient.check(status())
    patient.now += 299
    patient.check(status())


def test_a_pause_is_said_once_a_minute(patient, caplog):
    with caplog.at_level(logging.WARNING, "trainer_client"):
        for _ in range(13):
            patient.check(status(paused=True))
            patient.now += 5
    assert caplog.text.count("is paused") == 2


def test_a_service_gone_for_longer_than_its_time_is_told_and_a_shorter_absence_is_waited_for(patient):
    gone = ServiceUnreachable("connection refused")
    patient.now += 120
    patient.check(since=1000.0, trouble=gone)
    patient.now += 1
    with pytest.raises(ServiceUnreachable, match=r"121 s.*connection refused"):
        patient.check(since=1000.0, trouble=gone)


def test_an_absence_does_not_count_as_no_progress_afterwards(patient):
    patient.check(status())
    patient.now += 100
    patient.check(since=patient.now - 90, trouble=ServiceUnreachable("gone"))
    patient.now += 250
    patient.check(status())


def test_an_exhausted_service_says_what_to_set(patient):
    with pytest.raises(Exhausted, match=r"prompts\.epochs = 0.*max_steps"):
        patient.check(exhausted=True)


def test_a_service_whose_last_groups_are_all_trained_here_is_exhausted_too(patient):
    last = status(final=True, groups={"leased": 3, "acked": 17}, outstanding=3)
    with pytest.raises(Exhausted):
        patient.check(last, spent=3)


@pytest.mark.parametrize(
    ("more", "spent"),
    [({"final": False}, 3), ({"outstanding": 4}, 3), ({}, 2)],
    ids=["prompts may come", "more is outstanding", "rows are on their way"],
)
def test_while_something_may_still_come_it_is_not_exhausted(patient, more, spent):
    patient.check(status(**{"final": True, "groups": {"leased": 3}, "outstanding": 3, **more}), spent=spent)


def test_a_status_that_cannot_be_read_is_no_verdict(patient, caplog):
    patient.service.faults.append(Fault("/status", cut="before"))
    with caplog.at_level(logging.WARNING, "trainer_client"):
        patient.check()
    assert "status could not be read" in caplog.text
