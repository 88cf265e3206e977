"""Spans of groups, rollouts and engine requests in memory; their way to a collector; what tracing must not cost."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from rollout_service.core.group import GroupPolicy, OnStale
from rollout_service.core.model import FinishReason, Turn
from rollout_service.core.scheduler import Policy
from rollout_service.engines.faults import StatusFault
from rollout_service.errors import ConfigError
from rollout_service.observers import Observers
from rollout_service.orchestrator import LeaseRequest
from rollout_service.store import MemoryStore
from rollout_service.tracing import open_tracing
from rollout_service.tracing.export import SDK_LOGGER, Complaints, make_provider
from rollout_service.tracing.tracing import STOP_S, Tracing
from tests.engine_fleets import ask
from tests.fakes import Harness, Recorder, Runner, Scorer, failed, finished, submission, until
from tests.shell.tracing_collector import Collector, facts

ASK = LeaseRequest(max_groups=8, wait_s=5)
SECRET = "the secret words of a prompt"


class Traced:
    """Tracing into memory, and an orchestrator on fakes that is traced."""

    def __init__(self, *, ratio: float = 1.0, **rules: Any) -> None:
        self.memory = InMemorySpanExporter()
        self.provider: TracerProvider = make_provider(ratio)
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))
        self.tracing = Tracing(self.provider)
        self.runner = Runner()
        self.scorer = Scorer()
        self.harness = Harness(
            store=MemoryStore(max_staleness=4),
            policy=Policy(group=GroupPolicy(**rules), slots=16),
            runner=self.tracing.runner(self.runner),  # type: ignore[arg-type]  # it is a runner, if no fake one
            scorer=self.scorer,
            observer=Observers(Recorder(), self.tracing.observer),  # type: ignore[arg-type]  # the fake one ignores more
        )

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.memory.get_finished_spans() if span.name == name]

    async def ended(self, name: str, count: int = 1) -> list[ReadableSpan]:
        await until(lambda: len(self.spans(name)) >= count, f"{count} spans {name}")
        return self.spans(name)


def told(span: ReadableSpan) -> dict[str, Any]:
    """Attributes without `rollout.`."""
    return {name.removeprefix("rollout."): value for name, value in (span.attributes or {}).items()}


def within(child: ReadableSpan, parent: ReadableSpan) -> bool:
    """Whether `child` is one of `parent`'s, in the same trace and inside its time."""
    assert child.context is not None
    assert parent.context is not None
    assert child.start_time is not None
    assert parent.start_time is not None
    return (
        child.parent is not None
        and child.parent.span_id == parent.context.span_id
        and child.context.trace_id == parent.context.trace_id
        and parent.start_time <= child.start_time
    )


# groups and rollouts


async def test_an_acked_group_is_one_span_with_a_rollout_for_each_row_under_it():
    traced = Traced()
    traced.runner.answer = lambda job: finished(job.index)
    async with traced.harness as door:
        await door.submit([submission("a")])
        answer = await door.lease(ASK)
        assert not traced.spans("group"), "it lasts until its end"
        assert answer.lease is not None
        await door.ack(answer.lease.lease_id, None)
        (group,) = await traced.ended("group")
    assert told(group) == {
        "group_id": "g-1", "prompt_id": "a", "epoch": 0, "num_generations": 4, "attempt": 1, "policy_version": 0,
        "outcome": "acked",
    }  # fmt: skip
    assert group.parent is None
    assert [event.name for event in group.events] == ["scoring", "ready", "leased"]
    assert group.status.status_code is StatusCode.UNSET
    rollouts = traced.spans("rollout")
    assert sorted(told(span)["index"] for span in rollouts) == [0, 1, 2, 3]
    assert all(within(span, group) for span in rollouts)
    assert told(rollouts[0]) | {"index": 0} == {
        "group_id": "g-1", "attempt": 1, "index": 0, "policy_version": 0, "outcome": "finished",
        "finish_reason": "stop", "turns": 1, "completion_tokens": 3, "engine_attempts": 1,
    }  # fmt: skip


async def test_a_group_that_failed_is_an_error_with_its_rollouts_reasons():
    traced = Traced()
    traced.runner.answer = lambda job: failed(job.index, error=SECRET)
    async with traced.harness as door:
        await door.submit([submission("a")])
        (group,) = await traced.ended("group")
    assert told(group)["outcome"] == "failed"
    assert group.status.status_code is StatusCode.ERROR
    for span in traced.spans("rollout"):
        assert (told(span)["outcome"], told(span)["reason"]) == ("failed", "rejected")
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "rejected"


async def test_a_dropped_group_says_why():
    traced = Traced()
    traced.runner.answer = lambda job: finished(job.index) if job.index == 0 else failed(job.index)
    async with traced.harness as door:
        await door.submit([submission("a")])
        (group,) = await traced.ended("group")
    assert (told(group)["outcome"], told(group)["reason"]) == ("dropped", "too_few_survivors")


@pytest.mark.parametrize("on_stale", [OnStale.DROP, OnStale.REQUEUE])
async def test_a_group_that_went_stale_ends_its_span_and_a_new_attempt_is_a_new_trace(on_stale: OnStale):
    traced = Traced(max_staleness=0, on_stale=on_stale)
    async with traced.harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(traced.runner.held) == 4)
        await door.post_version(1)
        (group,) = await traced.ended("group")
        aborted = await traced.ended("rollout", 4)
        assert told(group)["outcome"] == "stale"
        assert told(group).get("goes_on", False) is (on_stale is OnStale.REQUEUE)
        assert {told(span)["outcome"] for span in aborted} == {"aborted"}
        assert {span.status.status_code for span in aborted} == {StatusCode.UNSET}, "an abort is no error"
        assert all(within(span, group) for span in aborted)
        if on_stale is OnStale.REQUEUE:
            await until(lambda: len(traced.runner.held) == 4)
            traced.runner.release()
            await door.lease(ASK)
            again = [span for span in await traced.ended("rollout", 8) if told(span)["attempt"] == 2]
            assert len(again) == 4
            assert {told(span)["policy_version"] for span in again} == {1}
            first, second = group.context, again[0].context
            assert first is not None
            assert second is not None
            assert second.trace_id != first.trace_id


async def test_a_reset_ends_the_span_of_every_opened_group():
    traced = Traced()
    traced.runner.answer = lambda job: finished(job.index)
    async with traced.harness as door:
        await door.post_version(3)
        await door.submit([submission("a")])
        await door.lease(ASK)
        traced.runner.answer = lambda job: None
        await door.post_version(1, reset=True)
        (group,) = await traced.ended("group")
        assert (told(group)["outcome"], told(group)["goes_on"], told(group)["policy_version"]) == ("reset", True, 3)


async def test_what_is_open_at_the_stop_ends_as_stopped_and_nothing_is_remembered():
    traced = Traced()
    async with traced.harness as door:
        await door.submit([submission("a")])
        await until(lambda: len(traced.runner.held) == 4)
    await traced.tracing.stop()
    (group,) = traced.spans("group")
    assert told(group)["outcome"] == "stopped"
    assert len(traced.spans("rollout")) == 4


async def test_a_group_taken_up_after_a_restart_has_a_span_from_then_on():
    store = MemoryStore(max_staleness=4)
    before = Harness(store=store)
    async with before as door:
        await door.submit([submission("a")])
        await until(lambda: len(before.runner.held) == 4)
        before.runner.held["g-1", 1, 0].set_result(finished(0))
        await until(lambda: len(before.observer.settled) == 1)
    traced = Traced()
    traced.harness = Harness(
        store=store,
        runner=traced.tracing.runner(traced.runner),  # type: ignore[arg-type]  # no fake runner
        observer=traced.tracing.observer,  # type: ignore[arg-type]  # no recorder
    )
    traced.runner.answer = lambda job: finished(job.index)
    async with traced.harness as door:
        answer = await door.lease(ASK)
        assert answer.lease is not None
        await door.ack(answer.lease.lease_id, None)
        (group,) = await traced.ended("group")
    assert (told(group)["group_id"], told(group)["prompt_id"], told(group)["outcome"]) == ("g-1", "a", "acked")
    rollouts = traced.spans("rollout")
    assert len(rollouts) == 3
    assert all(within(span, group) for span in rollouts)


async def test_a_runner_that_raises_is_an_error_and_raises_still():
    traced = Traced()

    def broken(_: Any) -> None:
        raise ZeroDivisionError(SECRET)

    traced.runner.answer = broken
    async with traced.harness as door:
        await door.submit([submission("a")])
        await traced.ended("group")
        assert "ZeroDivisionError" in ((await door.group("g-1")).payload.group.error or "")
    assert {told(span)["reason"] for span in traced.spans("rollout")} == {"ZeroDivisionError"}


async def test_the_rollouts_span_is_current_while_it_is_made_and_in_tasks_it_makes_and_not_outside():
    traced = Traced()
    seen: list[Any] = []

    class Asking:
        async def run(self, job: Any, gate: Any) -> Any:
            seen.append(get_current_span().get_span_context().span_id)
            seen.append(await asyncio.create_task(self.inside()))
            return finished(job.index)

        async def inside(self) -> int:
            return get_current_span().get_span_context().span_id

    job = type("Job", (), {"group_id": "g-1", "attempt": 1, "index": 0, "policy_version": 0})
    job.prompt = submission("a").prompt  # type: ignore[attr-defined]  # a namespace stands for the job
    await traced.tracing.runner(Asking()).run(job, None)  # type: ignore[arg-type]  # the gate is not asked
    (span,) = traced.spans("rollout")
    assert span.context is not None
    assert seen == [span.context.span_id] * 2
    assert not get_current_span().get_span_context().is_valid


async def test_of_the_groups_that_are_not_sampled_nothing_is_sent():
    traced = Traced(ratio=0.0)
    traced.runner.answer = lambda job: finished(job.index)
    async with traced.harness as door:
        await door.submit([submission(str(n)) for n in range(5)])
        answer = await door.lease(LeaseRequest(max_groups=8, min_groups=5, wait_s=5))
        assert answer.lease is not None
        await door.ack(answer.lease.lease_id, None)
    assert not traced.memory.get_finished_spans()


# engine requests


TURN = Turn(
    prompt_ids=finished(0).turns[0].prompt_ids,
    output_ids=finished(0).turns[0].output_ids,
    logprobs=finished(0).turns[0].logprobs,
    finish_reason=FinishReason.LENGTH,
    text=SECRET,
    engine="e0",
)


def test_an_engine_request_is_a_client_span_with_where_it_went_and_what_came():
    traced = Traced()
    with traced.tracing.calls.call(ask(SECRET), "g-1.1.0-abc", "http://engine:8000") as call:
        call.answered(TURN)
    (span,) = traced.spans("POST /v1/completions")
    assert span.kind is SpanKind.CLIENT
    assert span.context is not None
    context = span.context
    flags = f"{context.trace_flags:02x}"
    assert call.headers == {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"}
    assert span.attributes == {
        "http.request.method": "POST", "url.full": "http://engine:8000/v1/completions", "server.address": "engine",
        "server.port": 8000, "rollout.request_id": "g-1.1.0-abc", "rollout.outcome": "answered",
        "http.response.status_code": 200, "rollout.finish_reason": "length", "rollout.prompt_tokens": 2,
        "rollout.completion_tokens": 3,
    }  # fmt: skip


def test_an_engine_request_that_failed_has_its_status_and_reason_but_not_the_engines_words():
    traced = Traced()
    fault = StatusFault(503, SECRET)
    with pytest.raises(StatusFault), traced.tracing.calls.call(ask(), "r", "https://engine"):
        raise fault
    (span,) = traced.spans("POST /v1/completions")
    attributes = span.attributes or {}
    assert attributes["http.response.status_code"] == 503
    assert attributes["error.type"] == "StatusFault"
    assert attributes["rollout.reason"] == "server_error"
    assert attributes["server.port"] == 443
    assert span.status.status_code is StatusCode.ERROR
    assert SECRET not in span.to_json()


def test_an_engine_request_that_was_aborted_is_no_error():
    traced = Traced()
    with pytest.raises(asyncio.CancelledError), traced.tracing.calls.call(ask(), "r", "http://engine"):
        raise asyncio.CancelledError
    (span,) = traced.spans("POST /v1/completions")
    assert (told(span)["outcome"], span.status.status_code) == ("aborted", StatusCode.UNSET)


# the way to the collector


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    """Exporting takes the SDK's logger over, process-wide."""
    logger = logging.getLogger(SDK_LOGGER)
    before = list(logger.handlers), logger.propagate
    yield
    logger.handlers, logger.propagate = before


def spin(tracing: Tracing, count: int = 1) -> None:
    for number in range(count):
        with tracing.calls.call(ask(), f"r-{number}", "http://engine"):
            pass


async def test_the_stop_sends_what_is_queued_with_the_services_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    async with Collector() as collector:
        tracing = open_tracing(collector.endpoint, 1.0)
        assert tracing is not None
        spin(tracing, 3)
        await tracing.stop()
        assert [facts(span)["rollout.request_id"] for span in collector.spans] == ["r-0", "r-1", "r-2"]
        assert collector.resources[0]["service.name"] == "rollout-service"
        assert collector.headers[0]["x-token"] == "abc"


async def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "rollouts-of-team-7")
    assert make_provider(1.0).resource.attributes["service.name"] == "rollouts-of-team-7"


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "refusing"])
async def test_a_collector_that_is_gone_holds_up_neither_the_work_nor_the_stop(silent: bool):
    async with Collector() as collector:
        collector.silent = silent
        tracing = open_tracing(collector.endpoint if silent else "http://127.0.0.1:9/v1/traces", 1.0)
        assert tracing is not None
        clock = asyncio.get_running_loop().time
        spin(tracing, 4_000)  # twice the queue: each is an append, however long the exporter waits
        with structlog.testing.capture_logs() as said:
            started = clock()
            await tracing.stop()
            assert clock() - started < STOP_S + 1.0
        assert [entry["event"] for entry in said if entry["event"] != "traces_trouble"] == ["traces_not_flushed"]
        if not silent:  # who waits for an answer cannot be woken, who waits to try again can
            await until(lambda: not any(t.name.startswith("traces-flush") for t in threading.enumerate()))


def test_of_the_sdks_complaints_the_log_gets_one_line_a_minute():
    handler, logger = Complaints(), logging.getLogger("opentelemetry.of.this.test")
    logger.addHandler(handler)
    logger.propagate = False
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            logger.error("no way to %s", "the collector")
        logger.info("of no interest")
        handler._quiet_until = 0.0
        try:
            raise OSError("refused")
        except OSError:
            logger.exception("again")
    assert [(entry["event"], entry["error"], entry["left_out"]) for entry in said] == [
        ("traces_trouble", "no way to the collector", 0),
        ("traces_trouble", "again OSError('refused')", 2),
    ]


# what it must not cost


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_an_endpoint_nothing_of_the_sdk_is_imported():
    assert open_tracing("", 1.0) is None
    ours = run(
        "import sys; from rollout_service.tracing import open_tracing; open_tracing('', 1.0)\n"
        "print(*[name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert ours == ""
    # FastAPI imports OpenTelemetry's API, which does nothing without the SDK.
    whole = run(
        "import sys; import rollout_service.app, rollout_service.server\n"
        "print(*[name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])\n"
        "print(*[name for name in sys.modules if name.startswith('rollout_service.tracing.')])"
    )
    assert whole == ""


def test_without_the_extra_an_endpoint_is_a_mistake_that_says_what_to_install():
    said = run(
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from rollout_service.tracing import open_tracing\n"
        "try:\n    open_tracing('http://c/v1/traces', 1.0)\nexcept Exception as e:\n    print(type(e).__name__, e)"
    )
    assert said.startswith(ConfigError.__name__)
    assert "'.[otel]'" in said
