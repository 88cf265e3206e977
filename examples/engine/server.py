"""A real vLLM server on CPU cores, with the flags it needs to leave the other processes of a small machine alive.

    python -m examples.engine.server MODEL_DIR [--port 8000] [--max-model-len 4096]

It listens on 127.0.0.1 only: dev mode lets whoever reaches the port abort requests and replace the weights.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from examples.engine import environment
from examples.processes import Process, ProcessEnded, free_port

MODEL_NAME = "tiny"
START_S = 300.0  # 15 s on an idle machine; imports are slow on a busy one
WARM_UP_S = 180.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /abort_requests, /pause, /collective_rpc, /server_info
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # One thread in one process: the default executor spins on every core it finds.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def command(python: Path, model: Path, port: int, max_model_len: int = 4096) -> list[str]:
    """The server's command line. The `vllm` command itself needs a distribution of that name; the module does not."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", str(max_model_len)),
        *("--enforce-eager", "--distributed-executor-backend", "uni", "--enable-scale-out"),
        # Logprobs of the distribution that is sampled, also at temperatures other than 1.
        *("--logprobs-mode", "processed_logprobs"),
    ]


class VllmServer(Process):
    """A vLLM server that is healthy and warm once `ready()` has returned."""

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        *,
        max_model_len: int = 4096,
        port: int | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`port` None takes a free one; `flags` and `env` add to the command line and the environment."""
        self.model = model
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        # Out of the repository: a module of the same name in the working directory would shadow one of the engine's.
        super().__init__(
            "vLLM",
            [*command(python, model, port, max_model_len), *flags],
            log,
            env={**ENVIRONMENT, **(env or {})},
            cwd=Path(tempfile.gettempdir()),
        )

    def ready(self) -> None:
        """Wait for health, then pay for the first request with logprobs, which costs seconds. ProcessEnded if not."""
        self.wait_ready(f"{self.url}/health", START_S)
        body = {"model": MODEL_NAME, "prompt": "warm up", "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WARM_UP_S)
        if answer.status_code != 200:
            raise ProcessEnded(f"vLLM answered its first request with {answer.status_code}: {answer.text[:500]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a vLLM CPU server in the foreground.")
    parser.add_argument("model", type=Path, help="directory of the model, see make_tiny_model.py")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=4096)
    arguments = parser.parse_args()
    if reason := environment.why_impossible():
        sys.exit(reason)
    line = command(environment.make(), arguments.model.resolve(), arguments.port, arguments.max_model_len)
    os.execve(line[0], line, {**os.environ, **ENVIRONMENT})  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
