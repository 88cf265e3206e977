"""All tests, in three pytest processes side by side: most wait for a process or a clock, and two cores are idle then.

What always holds: each test file is in exactly one shard (the last takes whatever the others do not name); each
shard's output is printed whole, one after the other; the exit status is 0 only where all passed. Whatever they start
finds the service compiled: hundreds of processes would each compile it again, for half a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NAMED = (("e2e", "monitoring", "page", "core"), ("contract", "durability", "replicas", "replicas_chaos", "simulation"))
"""About a third of the time each. Whatever runs a real vLLM server stays in one process, so that no two of them run at
once, and so do the databases."""
LIMIT_S = 50 * 60.0
"""Twice what all take here; pytest-timeout cannot end a test that waits on uvloop, which swallows its signal."""
NO_TESTS = 5
"""pytest's exit status where `-k` or `-m` left nothing of a shard."""


def shards(folder: Path = TESTS) -> list[list[str]]:
    """Paths of each shard, relative to the repository."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("test_*.py")))
    rest = [name for name in names if not any(name in named for named in NAMED)]
    parts = [*([name for name in names if name in named] for named in NAMED), rest]
    return [[f"{folder.name}/{name}" for name in part] for part in parts]


def _ended(process: subprocess.Popen[bytes], started: float) -> int:
    """The exit status. One that hangs is interrupted as by a person: it says where it was, and fails."""
    try:
        return process.wait(max(1.0, started + LIMIT_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(60) or 1
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait() or 1


def main(arguments: list[str]) -> int:
    """`arguments` go to all."""
    started = time.monotonic()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="rollout-tests-") as folder:
        running = []
        for number, paths in enumerate(shards()):
            log = Path(folder) / f"shard-{number}.log"
            command = [sys.executable, "-m", "pytest", *paths, *arguments]
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, cwd=TESTS.parent, env=environ
                )
            running.append((paths, log, process))
        try:
            codes = [_ended(process, started) for _, _, process in running]
        except KeyboardInterrupt:
            codes = [process.wait() for _, _, process in running]  # they got the signal, too, and say so
        for paths, log, _ in running:
            sys.stdout.write(f"=== {' '.join(paths)}\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(log.read_bytes())
            sys.stdout.flush()
    sys.stdout.write(f"=== all shards: {time.monotonic() - started:.0f} s\n")
    chosen = any(argument.startswith(("-k", "-m")) for argument in arguments)
    return max(0 if code == NO_TESTS and chosen else abs(code) for code in codes)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
