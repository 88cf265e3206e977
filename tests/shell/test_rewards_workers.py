"""Sync reward functions in real worker processes: whatever they do, the next group is scored at normal speed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from reward_samples import FOLDER, job, told_pid, until
from structlog.testing import capture_logs

from rollout_service.core.model import Scores
from rollout_service.errors import ConfigError
from rollout_service.rewards import RewardScorer, RewardSpec, pool

Start = Callable[..., Awaitable[RewardScorer]]
FINE = {"mode": "fine"}


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    scorers = []

    async def make(function: str = "misbehave", *, processes: int = 1, timeout_s: float = 30.0, **more: object):
        specs = [RewardSpec(name=function, function=f"reward_samples:{function}", timeout_s=timeout_s)]
        scorer = RewardScorer(specs, processes=processes, **{"path": [FOLDER], **more})
        scorers.append(scorer)
        await scorer.start()
        return scorer

    yield make
    for scorer in scorers:
        await scorer.stop()


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def workers_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if "rewards.worker" in " ".join(child.cmdline())]


async def scored_fine(scorer: RewardScorer) -> None:
    scores = await scorer.score(job("a", "b", **FINE))
    assert scores == Scores(rewards={"misbehave": [1.0, 1.0]})


async def test_ten_busy_loops_are_killed_and_twenty_groups_after_them_are_scored_at_normal_speed(start: Start) -> None:
    errors: list[str] = []
    scorer = await start(timeout_s=0.3, on_error=errors.append)
    for _ in range(10):
        began = time.monotonic()
        scores = await scorer.score(job("a", "b", mode="busy"))
        assert scores.rewards == {"misbehave": [None, None]}
        assert scores.errors == {"misbehave": "timed out after 0.3 s"}
        assert scores.cancelled is None
        assert time.monotonic() - began < 5
    assert errors == ["misbehave"] * 10
    began = time.monotonic()
    for _ in range(20):
        await scored_fine(scorer)
    assert time.monotonic() - began < 5
    await until(lambda: len(workers_of(os.getpid())) == 2)


async def test_a_worker_held_by_c_code_and_a_child_of_user_code_are_killed_too(start: Start, tmp_path: Path) -> None:
    scorer = await start(timeout_s=2.0, processes=2)
    touch, child = tmp_path / "touch", tmp_path / "child"
    regex, running = await asyncio.gather(
        scorer.score(job("a", mode="regex", touch=str(touch))), scorer.score(job("a", mode="child", child=str(child)))
    )
    assert [*regex.errors.values(), *running.errors.values()] == ["timed out after 2 s"] * 2
    for path in (touch, child):
        pid = told_pid(path)
        assert pid is not None
        await until(lambda pid=pid: ended(pid))


async def test_a_warm_spare_takes_over_without_waiting_for_imports(start: Start, tmp_path: Path) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import time, pathlib\n"
        "gate = pathlib.Path(__file__).with_name('gate')\n"
        "while gate.exists(): time.sleep(0.01)\n"
        "def f(completions, mode):\n"
        "    while mode[0] == 'busy': pass\n"
        "    return [1.0] * len(completions)\n"
    )
    specs = [RewardSpec(name="slow", function="slow_import:f", timeout_s=1.0)]
    scorer = RewardScorer(specs, processes=1, path=[str(tmp_path)])
    await scorer.start()
    try:
        (tmp_path / "gate").touch()
        assert (await scorer.score(job("a", mode="busy"))).errors
        assert (await scorer.score(job("a", mode="fine"))).rewards == {"slow": [1.0]}
    finally:
        await scorer.stop()


async def test_time_in_the_queue_is_not_time_of_the_function(start: Start) -> None:
    scorer = await start(timeout_s=1.0)
    results = await asyncio.gather(*(scorer.score(job("a", mode="thread")) for _ in range(8)))
    assert [scores.errors for scores in results] == [{}] * 8


async def test_an_exception_is_named_logged_with_its_traceback_and_stays_in_its_group(start: Start) -> None:
    errors: list[str] = []
    scorer = await start(processes=2, on_error=errors.append)
    with capture_logs() as logs:
        bad, good = await asyncio.gather(scorer.score(job("a", "b", mode="raise")), scorer.score(job("a", **FINE)))
    assert bad.rewards == {"misbehave": [None, None]}
    assert bad.errors == {"misbehave": "ValueError: reward went ? wrong"}
    assert good == Scores(rewards={"misbehave": [1.0]})
    assert errors == ["misbehave"]
    (log,) = logs
    assert (log["event"], log["reward"], log["group_id"]) == ("reward_failed", "misbehave", "g")
    assert "reward_samples.py" in log["traceback"]
    assert "rewards/worker.py" not in log["traceback"]


async def test_a_program_that_exits_scored_nobody_and_the_worker_lives_on(start: Start) -> None:
    scorer = await start()
    scores = await scorer.score(job("a", "b", mode="exit"))
    assert (scores.cancelled, scores.rewards) == (None, {"misbehave": [None, None]})
    assert scores.errors["misbehave"].startswith("SystemExit")
    await scored_fine(scorer)


@pytest.mark.parametrize("mode", ["cancel", "futures-cancel", "interrupt"])
async def test_a_cancellation_in_user_code_cancels_the_group_and_the_worker_lives_on(start: Start, mode: str) -> None:
    errors: list[str] = []
    scorer = await start(on_error=errors.append)
    before = set(workers_of(os.getpid()))
    scores = await scorer.score(job("a", "b", mode=mode))
    assert scores.rewards == {"misbehave": [None, None]}
    assert scores.cancelled is not None
    assert scores.cancelled.startswith("misbehave: ")
    assert (scores.errors, errors) == ({}, [])
    await scored_fine(scorer)
    assert set(workers_of(os.getpid())) == before


@pytest.mark.parametrize(
    ("mode", "how"),
    [("os-exit", "exit code 7"), ("segfault", "signal SIGSEGV"), ("close-fds", "exit code|signal")],
)
async def test_a_worker_that_dies_by_itself_fails_its_group_only_and_is_replaced(
    start: Start, mode: str, how: str
) -> None:
    scorer = await start()
    for _ in range(3):
        scores = await scorer.score(job("a", "b", mode=mode))
        assert scores.rewards == {"misbehave": [None, None]}
        assert scores.errors["misbehave"].startswith("its worker died while it scored: ")
        assert any(part in scores.errors["misbehave"] for part in how.split("|"))
        await scored_fine(scorer)


async def test_what_user_code_prints_goes_to_stderr_and_does_not_disturb(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    scorer = await start()
    scores = await scorer.score(job("a", mode="print"))
    assert scores == Scores(rewards={"misbehave": [1.0]})
    out, err = capfd.readouterr()
    assert "printed by user code" in err
    assert out == ""


async def test_sigterm_to_the_whole_service_does_not_fail_what_is_being_scored(start: Start, tmp_path: Path) -> None:
    scorer = await start()
    touch, go = tmp_path / "touch", tmp_path / "go"
    task = asyncio.create_task(scorer.score(job("a", mode="wait", touch=str(touch), go=str(go))))
    await until(lambda: told_pid(touch))
    pid = told_pid(touch)
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    go.touch()
    assert (await task).rewards == {"misbehave": [1.0]}


async def test_a_cancelled_call_is_killed_where_other_scoring_waits(start: Start, tmp_path: Path) -> None:
    scorer = await start()
    touch = tmp_path / "touch"
    stale = asyncio.create_task(scorer.score(job("a", mode="busy", touch=str(touch))))
    await until(lambda: told_pid(touch))
    waiting = asyncio.create_task(scorer.score(job("a", "b", **FINE)))
    await asyncio.sleep(0)
    stale.cancel()
    assert await asyncio.wait_for(waiting, 10) == Scores(rewards={"misbehave": [1.0, 1.0]})
    assert stale.cancelled()
    pid = told_pid(touch)
    assert pid is not None
    await until(lambda: ended(pid))


async def test_a_cancelled_call_is_killed_when_scoring_comes_to_wait_later(start: Start, tmp_path: Path) -> None:
    scorer = await start()
    touch = tmp_path / "touch"
    stale = asyncio.create_task(scorer.score(job("a", mode="busy", touch=str(touch))))
    await until(lambda: told_pid(touch))
    stale.cancel()
    await asyncio.wait({stale})
    pid = told_pid(touch)
    assert pid is not None
    assert not ended(pid)
    await asyncio.wait_for(scored_fine(scorer), 10)
    await until(lambda: ended(pid))


async def test_a_cancelled_call_finishes_where_nobody_waits_and_its_answer_is_discarded(
    start: Start, tmp_path: Path
) -> None:
    scorer = await start()
    before = set(workers_of(os.getpid()))
    touch, go = tmp_path / "touch", tmp_path / "go"
    stale = asyncio.create_task(scorer.score(job("a", mode="wait", touch=str(touch), go=str(go))))
    await until(lambda: told_pid(touch))
    stale.cancel()
    await asyncio.wait({stale})
    go.touch()
    worker_pool = scorer._pool
    assert worker_pool is not None
    await until(lambda: not worker_pool._busy)
    await scored_fine(scorer)
    assert set(workers_of(os.getpid())) == before


async def test_a_cancelled_call_that_waits_in_the_queue_never_runs(start: Start, tmp_path: Path) -> None:
    scorer = await start()
    touch, go, never = tmp_path / "touch", tmp_path / "go", tmp_path / "never"
    running = asyncio.create_task(scorer.score(job("a", mode="wait", touch=str(touch), go=str(go))))
    await until(lambda: told_pid(touch))
    queued = asyncio.create_task(scorer.score(job("a", mode="fine", touch=str(never))))
    await asyncio.sleep(0)
    queued.cancel()
    await asyncio.wait({queued})
    go.touch()
    assert (await running).rewards == {"misbehave": [1.0]}
    await scored_fine(scorer)
    assert not never.exists()


async def test_stop_cancels_scoring_and_ends_every_worker(start: Start, tmp_path: Path) -> None:
    scorer = await start(processes=2)
    touch = tmp_path / "touch"
    running = asyncio.create_task(scorer.score(job("a", mode="busy", touch=str(touch))))
    await until(lambda: told_pid(touch))
    pids = workers_of(os.getpid())
    assert len(pids) == 3
    await scorer.stop()
    await asyncio.wait({running}, timeout=5)
    assert running.cancelled()
    assert all(ended(pid) for pid in pids)


async def test_imports_that_fail_later_are_reported_and_do_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", 0.1)
    module = tmp_path / "fragile.py"
    good = "import os\ndef f(completions, mode):\n    mode[0] == 'die' and os._exit(1)\n    return [1.0]\n"
    module.write_text(good)
    specs = [RewardSpec(name="fragile", function="fragile:f")]
    scorer = RewardScorer(specs, processes=1, path=[str(tmp_path)])
    await scorer.start()
    try:
        module.write_text("raise RuntimeError('not today')  # longer than it was before, for the cache\n" * 9)
        with capture_logs() as logs:
            for _ in range(2):
                assert "exit code 1" in (await scorer.score(job("a", mode="die"))).errors["fragile"]
            scores = await asyncio.wait_for(scorer.score(job("a", mode="fine")), 10)
            assert "RuntimeError: not today" in scores.errors["fragile"]
            await until(lambda: sum(log["event"] == "reward_worker_failed" for log in logs) >= 4)
        starts = [log["failures"] for log in logs if log["event"] == "reward_worker_failed"]
        assert starts == list(range(1, len(starts) + 1))
        module.write_text(good)

        async def recovered() -> bool:
            return (await scorer.score(job("a", mode="fine"))).rewards == {"fragile": [1.0]}

        end = time.monotonic() + 20
        while not await recovered():
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
    finally:
        await scorer.stop()


async def test_a_module_that_kills_the_worker_or_never_ends_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "endless.py").write_text("while True: pass\n")
    for module, message in [("deadly", "exit code 9"), ("endless", r"did not start within 0.5 s \(endless:f\)")]:
        specs = [RewardSpec(name="r", function=f"{module}:f")]
        timeout_s = 0.5 if module == "endless" else 60
        scorer = RewardScorer(specs, processes=1, path=[str(tmp_path)], start_timeout_s=timeout_s)
        with pytest.raises(ConfigError, match=message):
            await scorer.start()
    assert workers_of(os.getpid()) == []


SERVICE = """
import asyncio, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from reward_samples import FOLDER, job, told_pid, until
from rollout_service.rewards import RewardScorer, RewardSpec
from pathlib import Path

async def main():
    spec = RewardSpec(name="r", function="reward_samples:misbehave", timeout_s=600)
    scorer = RewardScorer([spec], processes=3, path=[FOLDER])
    await scorer.start()
    tasks = []
    for mode in ("busy", "regex", "child"):
        work = job("a", mode=mode, touch=sys.argv[2] + mode, child=sys.argv[2] + "childpid")
        tasks.append(asyncio.create_task(scorer.score(work)))
    await asyncio.wait(tasks)

asyncio.run(main())
"""


async def test_kill_9_of_the_service_ends_its_workers_whatever_they_do(tmp_path: Path) -> None:
    service = subprocess.Popen([sys.executable, "-c", SERVICE, json.dumps([*sys.path, FOLDER]), f"{tmp_path}/"])
    try:
        files = [tmp_path / name for name in ("busy", "regex", "child", "childpid")]
        await until(lambda: all(told_pid(path) for path in files))
        pids = {pid for path in files if (pid := told_pid(path))} | set(workers_of(service.pid))
        assert len(pids) == 5  # three busy workers, one spare, one child of user code
    finally:
        service.kill()
        service.wait()
    await until(lambda: all(ended(pid) for pid in pids))
