"""The `/sim` routes: what a test asks of the simulator itself. Real vLLM has none of them.

Always holds: they answer whatever state the engine is in: dead, paused, or scripted to answer errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Protocol

import msgspec

from .bodies import Refusal
from .content import decode_ids
from .control import Handler
from .engine import Engine
from .faults import FaultPlan, Rule
from .journal import Journal, Outcome, Record, view
from .wire import Exchange

PREFIX = "/sim/"
_DEFAULT_LIMIT = 1000


class Host(Protocol):
    """What the routes need of the simulator around them."""

    @property
    def engine(self) -> Engine: ...

    @property
    def faults(self) -> FaultPlan: ...

    @property
    def journal(self) -> Journal: ...

    down_status: int | None
    """Set: every other route answers this status at once."""

    def connections(self) -> int: ...

    def crash(self) -> None: ...

    def changed(self) -> None: ...


class _Down(msgspec.Struct, forbid_unknown_fields=True):
    status: Annotated[int, msgspec.Meta(ge=300, le=599)] | None


def routes(host: Host) -> dict[tuple[str, str], Handler]:
    """(method, path) → handler."""

    def add_faults(exchange: Exchange) -> None:
        host.faults.add(_decode(exchange, list[Rule]))
        exchange.answer_json({"rules": host.faults.view()})

    def clear_faults(exchange: Exchange) -> None:
        host.faults.clear()
        exchange.answer_json({"rules": []})

    def clear_requests(exchange: Exchange) -> None:
        host.journal.clear()
        exchange.answer_json({"requests": []})

    def set_down(exchange: Exchange) -> None:
        host.down_status = _decode(exchange, _Down).status
        exchange.answer_json({"status": host.down_status})

    def crash(exchange: Exchange) -> None:
        exchange.answer_json({"crashed": True})
        host.crash()

    table: dict[tuple[str, str], Callable[[Exchange], None]] = {
        ("POST", "/sim/faults"): add_faults,
        ("GET", "/sim/faults"): lambda exchange: exchange.answer_json({"rules": host.faults.view()}),
        ("DELETE", "/sim/faults"): clear_faults,
        ("GET", "/sim/requests"): lambda exchange: exchange.answer_json(_requests(host, exchange)),
        ("DELETE", "/sim/requests"): clear_requests,
        ("GET", "/sim/stats"): lambda exchange: exchange.answer_json(stats(host)),
        ("POST", "/sim/down"): set_down,
        ("POST", "/sim/crash"): crash,
    }
    return table


def stats(host: Host) -> dict[str, Any]:
    """Counts since the start or the last `DELETE /sim/requests`, and what is going on now."""
    engine, journal = host.engine, host.journal
    return {
        "running": engine.running,
        "waiting": engine.waiting,
        "paused": engine.paused,
        "weight_version": engine.weight_version,
        "requests": journal.requests,
        "completions": journal.completions,
        "outcomes": dict(journal.outcomes),
        "faults": journal.faults,
        "tokens_decoded": journal.tokens,
        "tokens_after_abort": journal.tokens_after_abort,
        "generated_tokens": engine.generated_tokens(),
        "abort_calls": journal.abort_calls,
        "abort_ids": journal.abort_ids,
        "empty_abort_calls": journal.empty_abort_calls,
        "connections": host.connections(),
        "peak_in_flight": engine.peak_in_flight,
        "cpu_s": time.process_time(),
    }


def record_view(record: Record) -> dict[str, Any]:
    """A record as JSON, its prompt as text."""
    prompt = "\n".join(decode_ids(ids, specials=True) for ids in record.prompts)
    return view(record, prompt)


def _requests(host: Host, exchange: Exchange) -> dict[str, Any]:
    """`?outcome=`, `?match=` (text in the prompt) and `?limit=` narrow it down; the latest come last."""
    query = exchange.query
    try:
        limit = int(query.get("limit", _DEFAULT_LIMIT))
        outcome = Outcome(query["outcome"]) if "outcome" in query else None
    except ValueError as problem:
        raise Refusal(400, str(problem), kind="Bad Request") from problem
    records = [record for record in host.journal.records() if outcome is None or record.outcome is outcome]
    views = [record_view(record) for record in records]
    if "match" in query:
        views = [one for one in views if query["match"] in one["prompt"]]
    return {"requests": views[-limit:] if limit > 0 else [], "outcomes": dict(host.journal.outcomes)}


def _decode(exchange: Exchange, kind: Any) -> Any:
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise Refusal(400, str(problem), kind="Bad Request") from problem
