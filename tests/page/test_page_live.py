"""The page against the real service: only engines are stand-ins."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

import tests.faults
from rollout_service.keys import hash_of, new_key
from tests.faults.scripted import Act, Engine, says
from tests.page.browser import Page
from tests.service import LiveService, prompt, until

REWARDS = Path(next(iter(tests.faults.__path__))) / "fault_rewards.py"

Start = Callable[..., Awaitable[LiveService]]


@pytest.hookimpl(optionalhook=True)  # of pytest-asyncio; an older one runs these tests on the standard loop
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop the service runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


@pytest.fixture
async def start(page: Page, engine: Engine, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the one service of a test and opens its page."""
    made: list[LiveService] = []

    async def start(**changes: Any) -> LiveService:
        shutil.copy(REWARDS, tmp_path)
        made.append(await LiveService(tmp_path, [engine.url], **changes).start())
        await page.open(f"http://127.0.0.1:{made[0].port}/")
        return made[0]

    yield start
    await page.leave()
    for service in made:
        await service.checked_stop()


async def test_every_count_is_that_of_status_and_a_bump_changes_it(page: Page, engine: Engine, start: Start) -> None:
    engine.on("p:held", Act(hold=True))
    service = await start(groups={"num_generations": 2, "max_staleness": 0})
    held, *_ = await service.submit(prompt("held"), prompt("a"), prompt("b"), prompt("c"))
    await service.wait_state(held, "generating")
    await until(lambda: _ready(service, 3))
    lease = await service.pull(max_groups=1)
    assert (await service.ack(lease["lease_id"])).status_code == 200
    await page.wait_text("[data-count=submitted]", "4")
    await page.wait_text("[data-state=acked] [data-count]", "1")
    status = await service.status()
    for state, number in status["groups"].items():
        assert await page.text(f"[data-state={state}] [data-count]") == str(number), state
    assert await page.text("[data-count=outstanding]") == str(status["outstanding"])
    assert await page.text("[data-figure=slots]") == f"{status['slots']['used']} / {status['slots']['total']}"
    assert "adds up" in await page.text(".verdict")
    await page.wait_text("[data-passed=leased-acked]", "1")
    await page.wait_text("[data-staleness='0']", "1")
    await page.wait_text(".rewards .readout", "version 0: mean")

    assert await page.text("[data-figure=version]") == "0"
    await service.bump(1)
    await page.wait_text("[data-figure=version]", "1")
    await page.wait_text("[data-state=stale] [data-count]", "3")
    await page.wait_text(".recent-list", held)
    await page.go(f"#/groups/{held}")
    assert "version 0 was too old at version 1" in await page.wait_text(".group .why", "too old")


async def test_a_failed_rollout_and_the_halt_it_brings_show_the_engines_message(
    page: Page, engine: Engine, start: Start
) -> None:
    engine.on("p:bad", Act(status=400, message="min_p must be in [0, 1], got 1.5"))
    service = await start(groups={"num_generations": 2})
    (bad,) = await service.submit(prompt("bad"))
    await page.wait_text("#headline", "HALTED")
    assert "min_p must be in [0, 1], got 1.5" in await page.text("#more")
    await page.click("#more a")
    await page.wait_text("#group-title", bad)
    await page.wait_text(".group .why", "min_p must be in [0, 1], got 1.5")
    assert (await service.http.post("/resume")).status_code == 200
    await page.wait_text("#headline", "Idle")


async def test_an_open_group_shows_survivors_failures_and_tokens(page: Page, engine: Engine, start: Start) -> None:
    acts = [says(1.0, "<b>sea</b>"), Act(status=400, message="no such tool"), says(0.0), Act(hold=True)]
    engine.on("p:mixed", lambda attempt: acts[attempt.nth])
    service = await start()
    (mixed,) = await service.submit(prompt("mixed", answer="42"))
    await page.go(f"#/groups/{mixed}")
    await page.wait_text(".cards", "no such tool")
    await page.wait_text(".cards", "in flight for")
    engine.release("p:mixed", says(0.5))
    await page.wait_text(".group-head", "ready")
    group = await page.text(".cards")
    assert "<b>sea</b>" in group
    assert "accuracy 0.500" in group
    assert "advantage +1.2" in group
    assert "42" in await page.text(".more")
    await page.press("t")
    await page.wait("document.querySelectorAll('.flow-of-tokens').length === 3")
    readings = await page.run(
        "[...document.querySelectorAll('.flow-of-tokens .token:not(.context)')].map(t => t.title)"
    )
    assert all("logprob \N{MINUS SIGN}0.5000" in title for title in readings)
    assert len(readings) == sum(len(attempt) for attempt in ("r=1.0;<b>sea</b>", "r=0.0;", "r=0.5;"))
    assert await page.run("document.querySelectorAll('.flow-of-tokens .context').length") == 3 * len("p:mixed;")
    lease = await service.pull()
    assert (await service.ack(lease["lease_id"])).status_code == 200
    await page.wait_text(".group-head", "acked")
    assert "<b>sea</b>" in await page.run("document.querySelector('.card[data-index=\"0\"] pre').textContent")


async def test_the_list_is_that_of_the_service(page: Page, start: Start) -> None:
    service = await start(groups={"num_generations": 2})
    ids = await service.submit(*(prompt(f"p{n}") for n in range(70)))
    await page.go("#/groups")
    await page.wait_text(".groups-table .rows .row", ids[-1])
    await page.click(".pager a:last-child")
    await page.wait(f"document.querySelector('.groups-table .rows .row:last-child')?.innerText.includes('{ids[0]}')")
    await page.click(".chip[data-state=failed]")
    await page.wait_text(".empty", "No group that is failed")


async def test_a_service_with_keys_asks_for_one(page: Page, start: Start) -> None:
    page.expected = ["status of 401", "status of 403"]
    keys = {role: new_key() for role in ("read", "submit")}
    tables = [{"name": role, "role": role, "hash": hash_of(key)} for role, key in keys.items()]
    service = await start(server={"keys": tables})
    service.http.headers["authorization"] = f"Bearer {keys['read']}"
    await page.wait("document.getElementById('key-dialog').open")
    await page.type(keys["submit"])
    await page.press("Enter")
    await page.wait_text("#headline", "403")
    await page.click("#key-button")
    await page.type(keys["read"])
    await page.press("Enter")
    await page.wait_text("#headline", "Idle")


async def _ready(service: LiveService, number: int) -> bool:
    return bool((await service.counts())["ready"] == number)
