"""A full disk, a file that is not what it should be, a store in use: said clearly, and nothing is lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_service.simulator import Simulator, SimulatorSettings
from tests.durability.forked import Forked
from tests.durability.lives import Lives
from tests.durability.tale import judge
from tests.service import prompt, until
from tests.warm import arun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of a running process and tmpfs are Linux's")

FULL_BYTES = 16384
"""Less than the first page in the write-ahead log needs, and more than the log of a test."""
BACK_WITHIN_S = 15.0
"""The service looks again after 5 s at the latest."""
Make = Callable[..., Forked]


@pytest.fixture
async def engine() -> AsyncIterator[Simulator]:
    async with Simulator(SimulatorSettings(latency=0.02, mean_tokens=8)) as engine:
        yield engine


@pytest.fixture
async def make(lives: Lives, engine: Simulator, tmp_path: Path) -> AsyncIterator[Make]:
    """A service in `tmp_path`, or in another directory."""
    async with AsyncExitStack() as stack:
        judge_url = await stack.enter_async_context(judge())

        def make(directory: Path = tmp_path, **changes: Any) -> Forked:
            service = Forked(lives, directory, engine.url, judge_url, **changes)
            stack.push_async_callback(service.let_go)
            return service

        yield make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small disk; the size limit of the other test stands for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


async def refused(call: Awaitable[httpx.Response], what: str) -> None:
    answer = await call
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"].endswith("store-unavailable"), answer.text
    assert what in answer.json()["detail"], answer.text


async def live_through(
    service: Forked,
    engine: Simulator,
    *,
    breaks: Callable[[], Any],
    mends: Callable[[], Any],
    small_ones_pass: bool = False,
) -> None:
    """With ready, leased and acked groups and rollouts in flight: the medium fails, comes back, and all goes on."""
    engine.faults.on("held", hang=True)
    done = await service.submit(*(prompt(f"a{i}") for i in range(6)))
    await asyncio.gather(*(service.wait_state(group, "ready") for group in done))
    acked = await service.pull(2)
    assert (await service.ack(acked["lease_id"])).status_code == 200
    leased = await service.pull(2, request_id="kept")
    held = await service.submit(prompt("held"))
    await engine.until(lambda engine: engine.engine.running == 4)

    breaks()
    # What is pending is written too: a prompt of this size needs room, wherever the pages of the file stand.
    big = prompt("late", padding="x" * 300_000)
    await refused(service.post_prompts(big), "cannot commit")
    await until(lambda: _not_ready(service, "the store cannot commit"), what="/readyz is 503 and says why")
    if not small_ones_pass:
        await refused(service.ack(leased["lease_id"]), "cannot commit")
        await refused(service.lease(1, 1), "cannot commit")
    assert (await service.status())["submitted"] == 7

    engine.faults.clear()
    mends()
    await until(lambda: _is(service, "/readyz", 200), BACK_WITHIN_S, "/readyz is 200 again")
    assert (await service.counts())["submitted"] == 7, "what was refused is not there"
    again = await service.pull(2, request_id="kept")
    assert again["groups"] == leased["groups"]
    assert (await service.ack(leased["lease_id"])).status_code == 200
    await service.submit(big, final=True)
    rest = await service.collect(4)
    assert {group["prompt_id"] for group in rest} >= {"held", "late"}
    assert (await service.pull(1, 5))["status"] == "exhausted"
    assert (await service.state(held[0])) == "acked"
    assert await service.end() == 0


async def _not_ready(service: Forked, why: str) -> bool:
    answer = await service.http.get("/readyz")
    return answer.status_code == 503 and why in answer.json()["detail"]


async def _is(service: Forked, path: str, status: int) -> bool:
    return await service.probe(path) == status


async def test_a_full_disk_is_said_and_the_run_goes_on_without_loss_when_there_is_room(
    make: Make, engine: Simulator, small_disk: Path
):
    service = await make(store={"url": f"sqlite:///{small_disk / 'rollout.db'}"}).start()
    # What a failed commit wrote to the log is undone and overwritten: there a small commit may still have room.
    mends = (small_disk / "filler").unlink
    await live_through(service, engine, breaks=lambda: fill(small_disk), mends=mends, small_ones_pass=True)


async def test_a_file_that_may_not_grow_is_said_and_the_run_goes_on_without_loss_when_it_may(
    make: Make, engine: Simulator, lives: Lives
):
    service = await make().start()

    def limit(size: int) -> None:
        assert lives.pid is not None
        resource.prlimit(lives.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    await live_through(service, engine, breaks=lambda: limit(FULL_BYTES), mends=lambda: limit(resource.RLIM_INFINITY))


async def test_killed_on_a_full_disk_it_starts_again_when_there_is_room_with_all_it_had_acknowledged(
    make: Make, small_disk: Path
):
    service = await make(store={"url": f"sqlite:///{small_disk / 'rollout.db'}"}).start()
    await service.submit(*(prompt(f"a{i}") for i in range(6)))
    groups = await service.collect(2)
    fill(small_disk)
    await refused(service.post_prompts(prompt("late", padding="x" * 300_000)), "cannot commit")
    assert await service.end(signal.SIGKILL) == -signal.SIGKILL
    (small_disk / "filler").unlink()
    await service.start()
    counts = await service.counts()
    assert (counts["submitted"], counts["acked"]) == (6, 2)
    rest = await service.collect(4)
    assert not {group["group_id"] for group in rest} & {group["group_id"] for group in groups}
    assert await service.end() == 0


@pytest.fixture
async def stopped(make: Make) -> Forked:
    """A service that ended well, with three groups in its store."""
    service = await make().start()
    for group in await service.submit(*(prompt(f"a{i}") for i in range(3))):
        await service.wait_state(group, "ready")
    assert await service.end() == 0
    return service


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def is_refused_untouched(service: Forked, *words: str) -> None:
    before = digest(service.store)
    line = await service.fails_to_start()
    assert str(service.store) in line
    for word in words:
        assert word in line, line
    assert digest(service.store) == before


async def test_a_corrupt_file_is_refused_and_left_as_it_was(stopped: Forked):
    whole = stopped.store.read_bytes()
    size = len(whole)
    for damaged, words in (
        (b"", None),
        (b"this is no database, only text\n" * 100, "is not a SQLite database"),
        (whole[: size // 2], "corrupt"),
        (whole[:16384] + os.urandom(size - 16384), "corrupt"),
    ):
        if words is not None:
            stopped.store.write_bytes(damaged)
            await is_refused_untouched(stopped, words)
    stopped.store.write_bytes(whole)
    await stopped.start()
    assert (await stopped.counts())["ready"] == 3


async def test_a_store_of_a_newer_version_is_refused_and_left_as_it_was(stopped: Forked):
    with closing(sqlite3.connect(stopped.store)) as connection:
        connection.execute("PRAGMA user_version = 999")
    await is_refused_untouched(stopped, "newer version", "999")


async def test_another_programs_database_is_refused_and_left_as_it_was(stopped: Forked):
    stopped.store.unlink()
    with closing(sqlite3.connect(stopped.store)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    await is_refused_untouched(stopped, "another program")


async def test_a_read_only_file_and_a_read_only_folder_are_refused(stopped: Forked):
    try:
        stopped.store.chmod(0o444)
        assert "not readable and writable" in await stopped.fails_to_start(obedient=True)
        stopped.store.chmod(0o644)
        # What the log of the service needs is there already.
        stopped.directory.chmod(0o555)
        assert "not writable" in await stopped.fails_to_start(obedient=True)
    finally:
        stopped.store.chmod(0o644)
        stopped.directory.chmod(0o755)
    await stopped.start()
    assert (await stopped.counts())["ready"] == 3


async def test_a_second_start_on_a_store_in_use_is_refused_and_disturbs_nobody(stopped: Forked):
    await stopped.start()
    second = await arun("serve", "--config", "rollout.toml", "--port", "0", cwd=stopped.directory)
    assert second.returncode == 2
    assert "is in use by another service (process " in second.stderr
    assert "Traceback" not in second.stderr
    assert (await stopped.counts())["ready"] == 3


async def test_a_store_that_turns_unreadable_while_it_runs_is_said_and_never_answers_half(stopped: Forked):
    await stopped.start()
    whole = stopped.store.read_bytes()
    with open(stopped.store, "r+b") as file:  # in place, as a broken disk would: the file stays the same file
        file.seek(16384)
        file.write(os.urandom(len(whole) - 16384))
    answer = await stopped.lease(3, 1)
    assert answer.status_code == 503, answer.text
    assert "cannot" in answer.json()["detail"]
    assert await stopped.probe("/livez") == 200
    await stopped.end(signal.SIGKILL)
    for suffix in ("-wal", "-shm"):
        Path(f"{stopped.store}{suffix}").unlink(missing_ok=True)
    await is_refused_untouched(stopped, "corrupt")


async def test_sigterm_answers_callers_aborts_what_is_in_flight_and_loses_nothing(make: Make, engine: Simulator):
    engine.faults.on("held", hang=True)
    service = await make().start()
    ready = await service.submit(*(prompt(f"a{i}") for i in range(3)))
    await asyncio.gather(*(service.wait_state(group, "ready") for group in ready))
    leased = await service.pull(2, request_id="mine")
    taken = await service.pull(1)
    assert (await service.ack(taken["lease_id"])).status_code == 200
    (half,) = await service.submit(prompt("held-half", n=4))
    await engine.until(lambda engine: engine.engine.running == 4)
    waiting = [asyncio.create_task(service.lease(1, 60)) for _ in range(3)]
    await until(lambda: _waiting(service, 3), what="three lease calls wait")

    begun = time.monotonic()
    service.lives.signal(signal.SIGTERM)
    for answer in await asyncio.gather(*waiting):
        assert answer.status_code == 200
        assert answer.json()["status"] == "empty"
    code = await service.lives.ended()
    assert code == 0, service.log()[-2000:]
    assert time.monotonic() - begun < 10
    assert engine.engine.running == 0, "what was in flight was aborted"

    engine.faults.clear()
    await service.start()
    counts = await service.counts()
    assert (counts["submitted"], counts["acked"], counts["leased"]) == (4, 1, 2)
    again = await service.pull(2, request_id="mine")
    assert again["groups"] == leased["groups"]
    assert (await service.ack(again["lease_id"])).status_code == 200
    assert [group["group_id"] for group in await service.collect(1)] == [half]
    for index in range(3):
        assert len(engine.requests(f"p:a{index};")) == 4, "finished rollouts were not generated again"
    assert await service.end() == 0


async def _waiting(service: Forked, count: int) -> bool:
    return bool((await service.status())["leases"]["waiting_calls"] == count)
