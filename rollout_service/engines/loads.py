"""What a vLLM engine says of its load, read from the text of its `/metrics`. Pure.

What always holds: no page raises, whatever is in it; a line that is malformed, negative or not finite counts as absent.
A server with several engines behind it (data parallel) has one line for each: requests and preemptions are added up,
and the fullest cache stands for all, because that one preempts first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import isfinite

_LINE = re.compile(
    # A literal beginning, the line break included, is found many times faster than `^` on pages of 100 KB.
    rb"\nvllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc|num_preemptions_total)"
    # Labels: a quoted value may hold anything, a closing brace and an escaped quote included.
    rb'(?:\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+\})?+'
    rb"[ \t]++([0-9+.eE-]{1,32})(?=[ \t\r\n]|\Z)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """The load of an engine at one moment, whoever caused it."""

    running: int
    """Requests in its batch."""
    waiting: int
    """Requests in its queue."""
    kv_usage: float = 0.0
    """Used share of its KV cache, 0 to 1; 0 where it does not say."""
    preemptions: int = 0
    """Requests it threw out of its batch to make room, since it started; 0 where it does not say."""


def read_load(raw: bytes) -> LoadReport | None:
    """The load in the page `raw`; None where it does not tell both running and waiting requests."""
    found: dict[bytes, list[float]] = defaultdict(list)
    for name, text in _LINE.findall(b"\n" + raw):
        try:
            value = float(text)
        except ValueError:
            continue  # a malformed line is as good as none
        if isfinite(value) and value >= 0:
            found[name].append(value)
    running, waiting = found.get(b"num_requests_running"), found.get(b"num_requests_waiting")
    if running is None or waiting is None:
        return None
    # The second name is that of versions before 0.11.
    usage = max(found[b"kv_cache_usage_perc"] or found[b"gpu_cache_usage_perc"], default=0.0)
    return LoadReport(
        running=_total(running),
        waiting=_total(waiting),
        kv_usage=min(1.0, usage),
        preemptions=_total(found[b"num_preemptions_total"]),
    )


def _total(values: list[float]) -> int:
    return sum(map(int, values))
