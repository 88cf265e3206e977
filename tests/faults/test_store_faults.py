"""A store that cannot commit: nothing is answered or acted on before it is on disk; all goes on when it can again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

from tests.faults.conftest import MakeService
from tests.faults.scripted import Act, Engine
from tests.service import LiveService, prompt, until


@contextmanager
def locked(live: LiveService) -> Iterator[None]:
    """A foreign tool holds the file for writing, as a backup or a shell does."""
    with closing(sqlite3.connect(live.directory / "rollout.db", timeout=10, isolation_level=None)) as tool:
        tool.execute("BEGIN IMMEDIATE")
        yield
        tool.execute("ROLLBACK")


async def test_a_bump_is_neither_answered_nor_acted_on_before_it_is_on_disk(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:A;", Act(hold=True))
    live = await service(groups={"max_staleness": 0})
    (group_id,) = await live.submit(prompt("A"))
    await engine.holding(4)
    with locked(live):
        bump = asyncio.create_task(live.bump(1))
        submit = asyncio.create_task(live.submit(prompt("B")))
        for _ in range(20):
            assert await live.probe("/livez") == 200, "the event loop does not wait for the disk"
        assert not bump.done()
        assert not submit.done()
        assert len(engine.in_flight("p:A;")) == 4
        assert engine.find("p:B;") == []
    assert (await bump)["aborted_rollouts"] == 4
    await submit
    await engine.holding(0, "p:A;")
    assert await live.state(group_id) == "stale"
    assert (await live.collect(1))[0]["policy_version"] == 1


async def test_a_store_that_cannot_commit_refuses_everything_aloud_and_nothing_is_lost_when_it_is_back(
    engine: Engine, service: MakeService
) -> None:
    engine.on("p:held;", Act(hold=True))
    live = await service()
    await live.bump(3)
    (ready,) = await live.submit(prompt("ready"))
    await live.wait_state(ready, "ready")
    (held,) = await live.submit(prompt("held"))
    await engine.holding(4)
    with locked(live):
        calls = [live.post_version(4), live.post_prompts(prompt("lost")), live.lease(1), live.http.post("/pause")]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["type"] for answer in answers} == {"/problems/store-unavailable"}
        assert all(answer.headers["retry-after"] for answer in answers)
        assert await live.probe("/readyz") == 503
        assert await live.probe("/livez") == 200
        assert await live.metric("rollout_store_up") == 0
        assert (await live.status())["store"]["ok"] is False
        assert (await live.lease(1, 0)).status_code == 503
        engine.on("p:held;", Act())
    await until(lambda: _store_up(live), 30)
    await live.wait_ready()
    assert await live.version() == 3, "what was not answered did not happen"
    assert (await live.status())["paused"] is False
    assert {group["group_id"] for group in await live.collect(2)} == {ready, held}
    counts = await live.counts()
    assert (counts["submitted"], counts["acked"]) == (2, 2)
    await live.submit(prompt("lost"))
    assert len(await live.collect(1)) == 1
    assert await live.metric("rollout_store_errors_total") >= 1
    assert await live.slots_used() == 0


async def _store_up(live: LiveService) -> bool:
    return bool((await live.status())["store"]["ok"])
