"""Tokens a second of a real vLLM CPU server, through the service beside a bare client.

What is measured: the server's own counter of generated tokens over a window, with 64 requests in flight at all times:
completions of 64 tokens from a tiny random model that never ends a sequence by itself, so that every generated token is
delivered. The server has ENGINE_CORE to itself; the client, or the service with its reward workers and its trainer, has
CLIENT_CORE. Runs alternate on one server. It says what the service costs a real engine that is as fast as the machine
allows, not how it does with an engine on a GPU.

The server's environment is that of the examples; it is made where it is missing (3.5 GB, some minutes).

    python -m benchmarks.vllm_tokens [--rounds 5] [--quick]
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx

from benchmarks.load import GROUP, MODEL, TOKENS, Times
from benchmarks.processes import CLIENT_CORE, ENGINE_CORE, ROOT, START_S, module, process, wait_for
from benchmarks.report import Figure, alternate, at_least, median, run_alone, shown
from benchmarks.serving import Acker, service, submit
from examples.engine import environment
from examples.engine.make_tiny_model import make_tiny_model
from examples.engine.server import MODEL_NAME, VllmServer

IN_FLIGHT = 64
TIMES, QUICK_TIMES = Times(2.0, 7.0), Times(2.0, 3.0)
FOR_EVER_S = 600.0
"""Longer than any run: the bare client is ended from outside."""
PROMPTS = 4000
RUNNING, GENERATED = "vllm:num_requests_running", "vllm:generation_tokens_total"


@contextmanager
def vllm_server() -> Iterator[str]:
    """A warm server on ENGINE_CORE; its URL. RuntimeError where there is none for this machine."""
    if reason := environment.why_impossible():
        raise RuntimeError(reason)
    python = environment.find() or environment.make()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", endless=True)
        names = ("--served-model-name", MODEL_NAME, MODEL)
        with VllmServer(python, model, Path(folder) / "vllm.log", flags=names) as server:
            if (os.cpu_count() or 1) > 1:
                # At once: the threads it makes from now on inherit it.
                os.sched_setaffinity(server.popen.pid, {ENGINE_CORE})
            server.ready()
            yield server.url


def gauge(url: str, name: str) -> float:
    """A gauge or counter of the server, summed over its labels."""
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


def watch(url: str, times: Times) -> float:
    """Tokens a second in the window, which begins when the engine has been full for the warm-up."""
    wait_for(lambda: gauge(url, RUNNING) == IN_FLIGHT, START_S, f"{IN_FLIGHT} requests in flight")
    time.sleep(times.warm_up_s)
    before, started = gauge(url, GENERATED), time.monotonic()
    time.sleep(times.window_s)
    return (gauge(url, GENERATED) - before) / (time.monotonic() - started)


def bare(url: str, times: Times) -> float:
    command = module("benchmarks.bare", url, IN_FLIGHT, times.warm_up_s, FOR_EVER_S)
    with process(command, CLIENT_CORE, cwd=ROOT, stdout=subprocess.DEVNULL):
        return watch(url, times)


def of_service(url: str, times: Times) -> float:
    tables = {"dispatch": {"max_inflight_rollouts": IN_FLIGHT}, "sampling": {"max_tokens": TOKENS}}
    with service(url, tables) as running:
        submit(running.url, PROMPTS)
        with Acker(running.url, core=CLIENT_CORE) as trainer:
            rate = watch(url, times)
    if not trainer.acked:
        raise RuntimeError("the trainer got nothing")
    return rate


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    times = QUICK_TIMES if quick else TIMES
    with vllm_server() as url:
        found = alternate(rounds, {"bare": partial(bare, url, times), "service": partial(of_service, url, times)})
    ours, beside = found["service"], found["bare"]
    return [
        Figure(
            key="vllm_tokens_ratio",
            what=f"tokens/s of a real vLLM CPU server through the service over a bare client, {IN_FLIGHT} in flight",
            value=median(ours) / median(beside),
            beside=f"{shown(median(ours), 'tokens/s')}, bare {shown(median(beside), 'tokens/s')}",
            goal=at_least(0.98),
            runs=tuple(one / other for one, other in zip(ours, beside, strict=True)),
            note=f"Completions of {TOKENS} tokens in groups of {GROUP}.",
        )
    ]


if __name__ == "__main__":
    run_alone(measure, "tokens a second of a real vLLM CPU server")
