"""TRL's own asynchronous rollout worker beside the service: completions a second, 256 in flight and 0.05 s.

What is measured: samples that TRL's trainer gets out of the worker's queue, in the worker's default setting (a score
queue of 16, 256 in flight) and in its best (a score queue of 64, 128 in flight), and completions of the service that
its trainer has acked, on the same lean engine. What always holds of TRL's runs: the worker is TRL's class, started as
TRL starts it (a spawned process, a bounded queue of samples), with one cheap reward and the cheapest chat template and
response template there can be. Another process is the trainer: it takes samples out of the queue, drops those older
than `MAX_STALENESS`, and raises the version where it is asked to. The worker has CLIENT_CORE to itself, the trainer
shares ENGINE_CORE with the engine. The one thing changed in TRL is its check that vLLM is installed here: the worker
speaks to vLLM over HTTP only.

    python -m benchmarks.trl_worker [--rounds 5] [--quick]
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import throughput
from benchmarks.load import GROUP, MODEL, TOKENS, Run, Times
from benchmarks.processes import (
    CLIENT_CORE,
    ENGINE_CORE,
    ROOT,
    cpu_seconds,
    lean_engine,
    module,
    new_run,
    process,
)
from benchmarks.report import Figure, Goal, alternate, at_least, median, run_alone, shown

RESULT = "result: "
"""What a line with an answer begins with: TRL may print lines of its own."""
BUFFER = 1024
"""TRL's default `queue_maxsize`, in samples."""
MAX_STALENESS = 1
SCORE_QUEUE, BEST_SCORE_QUEUE, BEST_IN_FLIGHT = 16, 64, 128
"""TRL's default, and the best setting found at this load."""
ROWS = 64
"""Prompts; TRL starts again with the first when they are used up."""
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE = {"defaults": {"role": "assistant"}, "fields": {"content": {"close": "<eos>"}}}
"""What TRL parses answers with: all of it is the content."""
WARM_UP_S, WINDOW_S, QUICK_S = 2.5, 5.0, 3.0
SILENT = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def brevity(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of all these benchmarks."""
    return [1.0 / len(ids) for ids in completion_ids]


def tokenizer() -> Any:
    """Bytes as ids, and the templates above."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",  # noqa: S106 - a token of text, not a password
        bos_token="<bos>",  # noqa: S106 - as above
        eos_token="<eos>",  # noqa: S106 - as above
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template, fast.response_template = TEMPLATE, RESPONSE
    return fast


def worker(url: str, *, in_flight: int, score_queue: int, rows: int, max_tokens: int) -> Any:
    """TRL's `AsyncRolloutWorker`, not started."""
    from datasets import Dataset
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    made = tokenizer()
    prompts = [{"prompt": [{"role": "user", "content": f"{number:08}"}]} for number in range(rows)]
    return AsyncRolloutWorker(
        model_name=MODEL,
        dataset=Dataset.from_list(prompts),
        reward_funcs=[brevity],
        processing_class=made,
        eos_token_ids=[made.eos_token_id],
        num_generations=GROUP,
        max_inflight_tasks=in_flight,
        queue_maxsize=BUFFER,
        score_queue_maxsize=score_queue,
        vllm_server_url=url,
        max_tokens=max_tokens,
    )


def pin(pid: int, core: int) -> None:
    """All threads of `pid` on one core; those it starts later inherit it."""
    if (os.cpu_count() or 1) > 1:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


class Trainer:
    """Takes samples until `end`; counts them, and remembers whose prompts it would have trained on."""

    def __init__(self, running: Any) -> None:
        self._worker = running
        self.taken = 0
        self.stale = 0
        self.delivered: set[str] = set()
        self.bumps: list[float] = []
        """When version 1, 2, … was given to the worker, by the monotonic clock."""

    def take(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            try:
                sample = self._worker.rollout_buffer.get(timeout=min(left, 0.5))
            except queue.Empty:
                self._worker.check_health(60)
                continue
            self.taken += 1
            if self._worker.model_version - sample.model_version > MAX_STALENESS:
                self.stale += 1
            else:
                self.delivered.add(sample.prompt[0]["content"])

    def bump(self, every_s: float, stop: threading.Event) -> None:
        due = time.monotonic() + every_s
        while not stop.wait(max(0.0, due - time.monotonic())):
            self.bumps.append(time.monotonic())
            self._worker.update_model_version(len(self.bumps))
            due += every_s


def run(asked: Mapping[str, Any]) -> dict[str, Any]:
    """One run in this process, with the worker in a process of its own."""
    running = worker(
        asked["url"],
        in_flight=asked["in_flight"],
        score_queue=asked["score_queue"],
        rows=asked["rows"],
        max_tokens=asked["max_tokens"],
    )
    running.start()
    try:
        child = running._process.pid
        pin(child, CLIENT_CORE)
        trainer, stop = Trainer(running), threading.Event()
        if asked["bump_every_s"]:
            threading.Thread(target=trainer.bump, args=(asked["bump_every_s"], stop), daemon=True).start()
        trainer.take(time.monotonic() + asked["warm_up_s"])
        before, cpu, started = trainer.taken, cpu_seconds(child), time.monotonic()
        trainer.take(started + asked["window_s"])
        count, cpu, ended = trainer.taken - before, cpu_seconds(child) - cpu, time.monotonic()
        stop.set()
    finally:
        running.stop()
    return {
        "per_s": count / (ended - started),
        "cpu_ms": 1000 * cpu / max(1, count),
        "window": [started, ended],
        "bumps": trainer.bumps,
        "delivered": sorted(trainer.delivered) if asked["bump_every_s"] else [],
    }


class TrlWorker:
    """A process that has imported TRL and runs its worker as often as it is asked: imports are half of a run's time."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child

    def run(
        self,
        url: str,
        times: Times,
        *,
        in_flight: int,
        score_queue: int,
        rows: int = ROWS,
        max_tokens: int = TOKENS,
        bump_every_s: float = 0.0,
    ) -> dict[str, Any]:
        """`per_s` and `cpu_ms` (of the worker's process) of one run against the engine `url`; with bumps also `window`
        and `bumps` (monotonic seconds) and `delivered` (texts of the prompts whose samples were trained on).

        RuntimeError where it failed; its log went to stderr."""
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("TRL's process was started without pipes")
        asked = {"url": url, "in_flight": in_flight, "score_queue": score_queue, "rows": rows}
        asked |= {"max_tokens": max_tokens, "bump_every_s": bump_every_s, **times._asdict()}
        self._child.stdin.write(json.dumps(asked) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith(RESULT):
                found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                return found
        raise RuntimeError(f"TRL's worker ended with {self._child.wait()}")

    def rate(self, url: str, times: Times, *, in_flight: int, score_queue: int) -> Run:
        """One run without bumps."""
        new_run(url)
        found = self.run(url, times, in_flight=in_flight, score_queue=score_queue)
        return Run(per_s=found["per_s"], cpu_ms=found["cpu_ms"])


@contextmanager
def trl_worker() -> Iterator[TrlWorker]:
    """Runs of TRL's worker, one after the other. It imports TRL while the caller goes on."""
    command = module("benchmarks.trl_worker", "--serve")
    environment = os.environ | SILENT
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process(command, ENGINE_CORE, cwd=ROOT, env=environment, **pipes) as child:
        yield TrlWorker(child)


def serve() -> None:
    """Runs what each line of standard input asks for, and answers with a line of standard output."""
    # Through `finally`, so that a run that is broken off does not leave its worker behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import_trl()
    for line in sys.stdin:
        print(RESULT + json.dumps(run(json.loads(line))), flush=True)


def import_trl() -> None:
    from accelerate.state import PartialState  # type: ignore[import-untyped]  # it comes without types
    from trl.experimental.async_grpo import async_rollout_worker

    PartialState()  # TRL logs through accelerate, which wants it first
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    logging.getLogger(async_rollout_worker.__name__).setLevel(logging.ERROR)


def measure(rounds: int, *, quick: bool) -> list[Figure]:
    times = Times(QUICK_S, QUICK_S) if quick else Times(WARM_UP_S, WINDOW_S)
    in_flight = throughput.FAST_IN_FLIGHT
    engine = lean_engine(throughput.FAST_LATENCY_S, stagger=in_flight, jitter=throughput.JITTER)
    with trl_worker() as trl, engine as url:
        default = partial(trl.rate, url, times, in_flight=in_flight, score_queue=SCORE_QUEUE)
        best = partial(trl.rate, url, times, in_flight=BEST_IN_FLIGHT, score_queue=BEST_SCORE_QUEUE)
        found = alternate(
            rounds,
            {"service": partial(throughput.fast_service, url, times), "TRL": default, "TRL, best setting": best},
        )
    return [
        _ratio("vs_trl_rate", "TRL's worker", found["service"], found["TRL"], at_least(2)),
        _ratio("vs_trl_best_rate", "TRL's best setting", found["service"], found["TRL, best setting"], at_least(1.3)),
    ]


def _ratio(key: str, who: str, ours: list[Run], theirs: list[Run], goal: Goal) -> Figure:
    rates = [shown(median(run.per_s for run in runs), "/s") for runs in (ours, theirs)]
    cpu = [shown(median(run.cpu_ms for run in runs), "ms") for runs in (ours, theirs)]
    return Figure(
        key=key,
        what=f"completions/s through the service over {who}, 256 in flight, 0.05 s",
        value=median(run.per_s for run in ours) / median(run.per_s for run in theirs),
        beside=f"{rates[0]} ({cpu[0]} CPU each), TRL {rates[1]} ({cpu[1]})",
        goal=goal,
        runs=tuple(a.per_s / b.per_s for a, b in zip(ours, theirs, strict=True)),
    )


if __name__ == "__main__":
    if "--serve" in sys.argv[1:]:
        serve()
    else:
        run_alone(measure, "TRL's rollout worker beside the service")
