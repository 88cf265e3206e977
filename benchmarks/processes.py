"""Processes of a benchmark: each on its own core, ended by pid, CPU and memory read from the kernel.

What always holds: whatever is started here has ended when its block ends, at the latest 10 s after it was told to.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLIENT_CORE, ENGINE_CORE = 0, 1
"""What is measured has one core, its reward workers included; the engine and the trainer share the other."""
TICK = os.sysconf("SC_CLK_TCK")
START_S = 60.0
KILL_AFTER_S = 10.0


def pinned(command: Sequence[str], core: int) -> list[str]:
    """`command` on one core, where the machine has several and `taskset`."""
    if (os.cpu_count() or 1) < 2 or shutil.which("taskset") is None:
        return list(command)
    return ["taskset", "-c", str(core), *command]


def module(name: str, *arguments: object) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *map(str, arguments)]


def cpu_seconds(pid: int) -> float:
    """CPU seconds that process `pid` has used, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def helpers_cpu_seconds(pid: int) -> float:
    """CPU seconds of the processes under `pid` that live now."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended since the listing
                continue
            parents[int(folder.name)] = int(fields[1])
            used[int(folder.name)] = (int(fields[11]) + int(fields[12])) / TICK
    return sum(seconds for child, seconds in used.items() if child != pid and _descends(child, pid, parents))


def _descends(child: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    while child in parents:
        child = parents[child]
        if child == ancestor:
            return True
    return False


def resident_bytes(pid: int) -> int:
    """Resident memory of process `pid`."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def process(command: Sequence[str], core: int, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Runs until the block ends; then SIGTERM, and SIGKILL after 10 s."""
    with subprocess.Popen(pinned(command, core), text=True, **options) as child:  # type: ignore[call-overload]  # **kw
        try:
            yield child
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                child.kill()


def output(command: Sequence[str], core: int, within_s: float = 300.0) -> str:
    """The last line that `command` prints. RuntimeError with what it said where it fails or takes longer."""
    try:
        done = subprocess.run(
            pinned(command, core), cwd=ROOT, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)}: not ended after {within_s:g} s") from error
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


@contextmanager
def engine(*options: str) -> Iterator[str]:
    """A simulated engine (`rollout-service simulate-engine`) on a free port; its URL."""
    with _serving(module("rollout_service", "simulate-engine", "--port", 0, *options)) as url:
        yield url


@contextmanager
def lean_engine(
    latency_s: float,
    *,
    spread: float = 0.0,
    tokens: int = 64,
    stagger: int = 0,
    jitter: float = 0.0,
    core: int = ENGINE_CORE,
) -> Iterator[str]:
    """An engine that costs next to nothing (`benchmarks.engine`) on a free port; its URL."""
    options = ("--latency", latency_s, "--spread", spread, "--tokens", tokens, "--stagger", stagger, "--jitter", jitter)
    with _serving(module("benchmarks.engine", *options), core) as url:
        yield url


def new_run(engine_url: str) -> None:
    """Tell a lean engine that the next request begins a run: its journal is empty, its stagger starts again."""
    request = urllib.request.Request(f"{engine_url}/journal", method="DELETE")
    with urllib.request.urlopen(request, timeout=10):
        pass


@contextmanager
def _serving(command: Sequence[str], core: int = ENGINE_CORE) -> Iterator[str]:
    with process(command, core, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        if child.stdout is None:
            raise RuntimeError("the engine has no output to read")
        if not select.select([child.stdout], [], [], START_S)[0]:
            raise RuntimeError(f"the engine did not start in {START_S:g} s")
        url = next(word for word in child.stdout.readline().split() if word.startswith("http"))
        yield url.rstrip("/.,")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service that runs."""

    url: str
    pid: int
    folder: Path
    """Its working directory, with its configuration and its store."""


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder on a real disk, where the temporary folder may be memory; removed with the block."""
    made = Path(tempfile.mkdtemp(prefix=".bench-", dir=ROOT))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@contextmanager
def service(config: str, files: Mapping[str, str], *, core: int = CLIENT_CORE, within: Path) -> Iterator[Service]:
    """The service on a free port, ready, with `files` beside its configuration in the folder `within`."""
    for name, content in files.items():
        (within / name).write_text(content)
    (within / "bench.toml").write_text(config)
    with serving(within, core=core) as running:
        wait_for(lambda: answers_200(f"{running.url}/readyz"), START_S, "the service is ready")
        yield running


@contextmanager
def serving(within: Path, *, core: int = CLIENT_CORE) -> Iterator[Service]:
    """The service with the configuration that is in `within`; it may not be ready yet."""
    port = free_port()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = module("rollout_service", "serve", "--config", "bench.toml", "--port", port, "--log-level", "error")
    # stderr goes to a file, not to a pipe that nobody empties; it is shown when the service has died.
    with (within / "errors.log").open("w+") as errors:
        environment = os.environ | {"PYTHONPATH": path}
        with process(command, core, cwd=within, env=environment, stdout=errors, stderr=errors) as child:
            try:
                yield Service(url=f"http://127.0.0.1:{port}", pid=child.pid, folder=within)
            except Exception as error:  # whatever it was, a service that died is the reason to show
                if child.poll() is None:
                    raise
                errors.seek(0)
                raise RuntimeError(f"the service ended with {child.returncode}:\n{errors.read()[-2000:]}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(condition: Callable[[], bool], within_s: float, what: str, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {within_s:g} s: {what}")
        time.sleep(every_s)


def answers_200(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
