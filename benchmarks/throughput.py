"""Completions a second, CPU per completion and event-loop lag: the service beside a bare aiohttp client and httpx.

What is measured: completions of 64 tokens, N in flight, against a lean engine that costs next to nothing. The service
runs with SQLite in FULL on a real disk, prompts from a file and a reward on; its completions count when the ack of
their group was answered. Each client has core 0 to itself (the service with its reward workers), the engine and the
trainer share core 1. Runs alternate, medians count, so that a noisy machine is noisy for all.

    python -m benchmarks.throughput [--rounds 5] [--quick]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial

from benchmarks import processes
from benchmarks.load import GROUP, PROMPTS_FILE, REWARDS, Run, Times, config, prompts
from benchmarks.report import Figure, alternate, at_least, at_most, below, median, run_alone, shown

LATENCY_S = 2.0
JITTER = 0.25
"""Of the durations, so that no stall of a client comes back as a wave for ever."""
TIMES = Times(4.5, 6.0)
"""Two completions' time and what a start costs; the engine's stagger makes the mixed state from the beginning."""
FAST_LATENCY_S, FAST_IN_FLIGHT = 0.05, 256
FAST_TIMES = Times(2.5, 6.0)
CALM_LATENCY_S = 8.0
"""4,096 in flight end at the rate of 1,024 in 2 s then: measured where 4,096 in 2 s are more than a core can do, to
tell what it costs to have many in flight from what it costs to be full."""
CALM_TIMES = Times(9.0, 6.0)
HTTPX_TIMES = Times(3.0, 5.0)
"""It stands beside the others to show its order of magnitude, and stalls longer the longer it runs."""
QUICK_TIMES = Times(3.0, 3.0)
PROMPTS = 5000
"""In the file; it is read again and again."""
MOST_MIN_GROUPS = 16
"""A trainer takes a batch a step, not what happens to be ready: 128 completions."""
FULL_CORE = 0.85
"""From this share on a core is taken for full: the kernel has its own part of it."""
EXTRA_S = 150.0
"""Start and end of a client beyond its times, on a machine that does other things too."""

Clients = dict[str, list[Run]]


def bare(engine_url: str, in_flight: int, times: Times) -> Run:
    """aiohttp on uvloop and nothing else."""
    return _client("benchmarks.bare", engine_url, in_flight, times)


def httpx_alone(engine_url: str, in_flight: int, times: Times) -> Run:
    """httpx with its own transport."""
    return _client("benchmarks.httpx_bare", engine_url, in_flight, min(times, HTTPX_TIMES))


def service(engine_url: str, in_flight: int, times: Times, *, store: str = "sqlite:///bench.db") -> Run:
    """The service and a trainer that leases and acks."""
    processes.new_run(engine_url)
    files = {"bench_rewards.py": REWARDS, PROMPTS_FILE: prompts(PROMPTS)}
    # A window has to hold many leases, also with few in flight.
    min_groups = max(1, min(MOST_MIN_GROUPS, in_flight // GROUP // 8))
    with (
        processes.folder() as folder,
        processes.service(config(engine_url, in_flight=in_flight, store=store), files, within=folder) as running,
    ):
        command = processes.module("benchmarks.trainer", running.url, running.pid, *times, min_groups, in_flight)
        return Run(**json.loads(processes.output(command, processes.ENGINE_CORE, sum(times) + EXTRA_S)))


def fast_service(engine_url: str, times: Times = FAST_TIMES) -> Run:
    """The service at full throttle, 256 in flight; the engine's latency has to be FAST_LATENCY_S."""
    return service(engine_url, FAST_IN_FLIGHT, times)


def _client(name: str, engine_url: str, in_flight: int, times: Times) -> Run:
    processes.new_run(engine_url)
    command = processes.module(name, engine_url, in_flight, *times)
    return Run(**json.loads(processes.output(command, processes.CLIENT_CORE, sum(times) + EXTRA_S)))


def compare(
    clients: dict[str, Callable[[str, int, Times], Run]],
    *,
    in_flight: int,
    latency_s: float,
    times: Times,
    rounds: int,
) -> Clients:
    """Runs of every client, alternating, against one engine."""
    with processes.lean_engine(latency_s, stagger=in_flight, jitter=JITTER) as url:
        return alternate(rounds, {name: partial(client, url, in_flight, times) for name, client in clients.items()})


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    """The service at 1,024 and 4,096 in flight and 2 s, and at full throttle: 256 in flight and 0.05 s."""
    slow, fast = (QUICK_TIMES, QUICK_TIMES) if quick else (TIMES, FAST_TIMES)
    in_memory = partial(service, store="memory://")
    at_1024 = compare(
        {"bare": bare, "service": service, "service, memory store": in_memory, "httpx": httpx_alone},
        in_flight=1024,
        latency_s=LATENCY_S,
        times=slow,
        rounds=rounds,
    )
    at_4096 = compare(
        {"bare": bare, "service": service}, in_flight=4096, latency_s=LATENCY_S, times=slow, rounds=rounds
    )
    at_256 = compare(
        {"bare": bare, "service": service, "httpx": httpx_alone},
        in_flight=FAST_IN_FLIGHT,
        latency_s=FAST_LATENCY_S,
        times=fast,
        rounds=rounds,
    )
    figures = [_ratio(at_1024, 1024, LATENCY_S), _ratio(at_4096, 4096, LATENCY_S), _lag(at_4096, LATENCY_S)]
    if not _keeps_pace(at_4096, 4096, LATENCY_S):
        calm = compare(
            {"bare": bare, "service": service},
            in_flight=4096,
            latency_s=CALM_LATENCY_S,
            times=CALM_TIMES,
            rounds=rounds,
        )
        figures += [_ratio(calm, 4096, CALM_LATENCY_S), _lag(calm, CALM_LATENCY_S)]
    return [*figures, *_cost(at_1024), *_full_throttle(at_256), _httpx(at_1024)]


def _keeps_pace(found: Clients, in_flight: int, latency_s: float) -> bool:
    """Whether the bare client did what the engine's latency allows."""
    return _rate(found, "bare") > 0.9 * in_flight / latency_s


def _suffix(latency_s: float) -> str:
    return "" if latency_s == LATENCY_S else f"_{latency_s:g}s"


def _ratio(found: Clients, in_flight: int, latency_s: float) -> Figure:
    rates = [shown(_rate(found, name), "/s") for name in ("service", "bare")]
    finished = median(run.finished_per_s for run in found["service"])
    keeps_pace = _keeps_pace(found, in_flight, latency_s)
    return Figure(
        key=f"throughput_ratio_{in_flight}{_suffix(latency_s)}",
        what=f"completions/s through the service over a bare client's, {in_flight:,} in flight, {latency_s:g} s",
        value=_rate(found, "service") / _rate(found, "bare"),
        beside=f"{rates[0]} ({shown(finished, '/s')} finished), bare {rates[1]}",
        goal=at_least(0.95),
        runs=_ratios(found, "service", "bare"),
        note="" if keeps_pace else _core_note(found["bare"], in_flight, latency_s),
    )


def _httpx(found: Clients) -> Figure:
    return Figure(
        key="httpx_per_s_1024",
        what="httpx alone, completions/s, 1,024 in flight, 2 s",
        value=_rate(found, "httpx"),
        unit="/s",
        beside=f"service {shown(_rate(found, 'service'), '/s')}",
        runs=_all(run.per_s for run in found["httpx"]),
    )


def _core_note(runs: list[Run], in_flight: int, latency_s: float) -> str:
    share = median(run.per_s * run.cpu_ms / 1000 for run in runs)
    if share < FULL_CORE:
        return f"The bare client had only {share:.0%} of its core and was not full: something else ran. Measure again."
    rate = median(run.per_s for run in runs)
    return (
        f"{in_flight:,} in flight in {latency_s:g} s are {in_flight / latency_s:,.0f}/s, more than one core of this "
        f"machine gives any client: the bare one uses {share:.0%} of it and does {rate:,.0f}/s. What is compared is "
        "then CPU per completion."
    )


def _cost(found: Clients) -> list[Figure]:
    ours, beside = (_all(run.cpu_ms for run in found[name]) for name in ("service", "bare"))
    durable, memory = _rate(found, "service"), _rate(found, "service, memory store")
    memory_cpu = median(run.cpu_ms for run in found["service, memory store"])
    return [
        Figure(
            key="cpu_ms_per_completion",
            what="CPU of the service for a completion of 64 tokens, 1,024 in flight",
            value=median(ours),
            unit="ms",
            beside=f"bare {shown(median(beside), 'ms')}; with a memory store {shown(memory_cpu, 'ms')}",
            goal=at_most(0.45),
            runs=ours,
        ),
        Figure(
            key="cpu_ms_bare",
            what="CPU of a bare client for the same",
            value=median(beside),
            unit="ms",
            runs=beside,
        ),
        Figure(
            key="cpu_ms_helpers",
            what="CPU of the service's reward workers for the same",
            value=median(run.helpers_cpu_ms for run in found["service"]),
            unit="ms",
            runs=_all(run.helpers_cpu_ms for run in found["service"]),
        ),
        Figure(
            key="durability_cost_1024",
            what="completions/s lost to SQLite in FULL, 1,024 in flight (negative: none)",
            value=1 - durable / memory,
            unit="%",
            beside=f"SQLite {shown(durable, '/s')}, memory {shown(memory, '/s')}",
            runs=tuple(1 - ratio for ratio in _ratios(found, "service", "service, memory store")),
        ),
    ]


def _full_throttle(found: Clients) -> list[Figure]:
    rates = {name: _all(run.per_s for run in runs) for name, runs in found.items()}
    cpu = {name: shown(median(run.cpu_ms for run in runs), "ms") for name, runs in found.items()}
    names = {"service": "the service", "bare": "a bare client", "httpx": "httpx alone"}
    return [
        Figure(
            key=f"{client}_per_s_256",
            what=f"completions/s of {names[client]}, 256 in flight, 0.05 s",
            value=median(rates[client]),
            unit="/s",
            beside=f"CPU {cpu[client]} each",
            runs=rates[client],
        )
        for client in ("service", "bare", "httpx")
    ]


def _lag(found: Clients, latency_s: float) -> Figure:
    ours = _all(run.lag_p99_ms for run in found["service"] if not math.isnan(run.lag_p99_ms))
    if not ours:
        raise RuntimeError("the service's /metrics has no event-loop lag")
    return Figure(
        key=f"loop_lag_p99_ms_4096{_suffix(latency_s)}",
        what=f"event-loop lag of the service, p99, 4,096 in flight, {latency_s:g} s",
        value=median(ours),
        unit="ms",
        beside=f"bare {shown(median(run.lag_p99_ms for run in found['bare']), 'ms')}",
        goal=below(50),
        runs=ours,
    )


def _rate(found: Clients, name: str) -> float:
    return median(run.per_s for run in found[name])


def _ratios(found: Clients, name: str, over: str) -> tuple[float, ...]:
    return _all(a.per_s / b.per_s for a, b in zip(found[name], found[over], strict=True))


def _all(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(values)


if __name__ == "__main__":
    run_alone(measure, "completions a second, CPU and loop lag beside a bare client and httpx")
