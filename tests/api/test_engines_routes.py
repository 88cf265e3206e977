"""`POST /engines` and `DELETE /engines/{id}` over a real fleet: statuses, problems, and what the rest then shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from rollout_service.engines import EngineSpec, Fleet, FleetSettings
from rollout_service.settings.registration import read_pattern
from tests.api.conftest import Service, settings_with
from tests.engine_fleets import generate, until
from tests.engine_script import Reply, ScriptedEngine, hold


class Run:
    """A service over a real fleet of one scripted engine, and a second engine beside it."""

    def __init__(self, service: Service, fleet: Fleet, first: ScriptedEngine, second: ScriptedEngine) -> None:
        self.service, self.fleet, self.first, self.second = service, fleet, first, second

    async def add(self, **body: Any) -> httpx.Response:
        return await self.service.post("/engines", body)

    async def remove(self, id: str, query: str = "?drain_s=0") -> httpx.Response:
        return await self.service.http.delete(f"/engines/{id}{query}")

    async def ids(self) -> list[str]:
        return [engine["id"] for engine in (await self.service.http.get("/engines")).json()["engines"]]


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    settings = FleetSettings(probe_interval_s=0.05, addable=(read_pattern("http://127.0.0.0/8:*"),), max_engines=3)
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        fleet = Fleet([EngineSpec(url=first.url)], settings)
        await fleet.start()
        try:
            async with Service(fleet=fleet).running() as service:  # type: ignore[arg-type]  # a real one this time
                yield Run(service, fleet, first, second)
        finally:
            await fleet.stop()


async def test_an_engine_is_added_and_described_as_in_the_list(run: Run) -> None:
    added = await run.add(url=run.second.url, max_inflight=7)
    assert added.status_code == 201
    assert (await run.service.http.get("/engines")).json()["engines"][1] == added.json()
    assert (added.json()["id"], added.json()["max_inflight"], added.json()["healthy"]) == ("e1", 7, True)
    again = await run.add(url=run.second.url + "/", max_inflight=9)
    assert (again.status_code, again.json()["id"], again.json()["max_inflight"]) == (200, "e1", 9)
    assert await run.service.counter('rollout_engine_slots{engine="e1"}') == 9


async def test_a_limit_that_sets_itself_is_asked_for_by_name(run: Run) -> None:
    added = await run.add(url=run.second.url, max_inflight="auto")
    assert (added.status_code, added.json()["auto"]) == (201, True)
    assert 1 <= added.json()["max_inflight"] <= 1024
    fixed = await run.add(url=run.second.url, max_inflight=9)
    assert (fixed.status_code, fixed.json()["auto"], fixed.json()["max_inflight"]) == (200, False, 9)
    back = await run.add(url=run.second.url, max_inflight="auto")
    assert (back.status_code, back.json()["auto"]) == (200, True)


@pytest.mark.parametrize("value", [0, -1, 100_001, 1.0, True, "64", "Auto", "", [], {}])
async def test_a_limit_of_another_kind_is_refused_in_one_line(run: Run, value: Any) -> None:
    answer = await run.add(url=run.second.url, max_inflight=value)
    assert (answer.status_code, answer.json()["field"]) == (422, "max_inflight")
    assert 'expected an integer from 1 to 100000, or "auto"' in answer.json()["detail"]
    assert await run.ids() == ["e0"]


async def test_an_engine_that_is_not_up_yet_is_added_unhealthy(run: Run) -> None:
    await run.second.stop()
    added = await run.add(url=run.second.url)
    assert (added.status_code, added.json()["healthy"]) == (201, False)


@pytest.mark.parametrize(
    ("body", "status", "slug"),
    [
        ({"url": "http://10.0.0.7:8000"}, 403, "engine-not-allowed"),
        ({"url": "http://2130706433:8000"}, 403, "engine-not-allowed"),
        ({"url": "http://0x7f.1:8000"}, 403, "engine-not-allowed"),
        ({"url": "http://localhost:8000"}, 403, "engine-not-allowed"),
        ({"url": "http://user:hunter2@127.0.0.1:8000"}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:8000@evil:8000"}, 422, "invalid-field"),
        ({"url": "ftp://127.0.0.1"}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:8000/v1"}, 422, "invalid-field"),
        ({"url": ""}, 422, "invalid-field"),
        ({"url": 7}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:" + "0" * 2048}, 422, "invalid-field"),
        ({}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:1", "max_inflight": 0}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:1", "max_inflight": 1.0}, 422, "invalid-field"),
        ({"url": "http://127.0.0.1:1", "api_key": "sk"}, 422, "invalid-field"),
    ],
)
async def test_what_cannot_be_added_is_refused(run: Run, body: dict[str, Any], status: int, slug: str) -> None:
    answer = await run.add(**body)
    assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{slug}")
    assert "hunter2" not in answer.text
    assert await run.ids() == ["e0"]


async def test_an_engine_that_is_wrong_for_the_run_is_refused_in_its_own_words(run: Run) -> None:
    run.second.models = {"data": []}
    answer = await run.add(url=run.second.url)
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/engine-refused")
    assert "it serves nothing" in answer.json()["detail"]
    assert await run.ids() == ["e0"]


async def test_too_many_are_a_conflict(run: Run) -> None:
    for port in (1, 2):
        assert (await run.add(url=f"http://127.0.0.1:{port}")).status_code == 201
    answer = await run.add(url="http://127.0.0.1:3")
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict")


async def test_the_last_engine_can_be_removed_and_the_service_is_not_ready_then(run: Run) -> None:
    assert (await run.service.http.get("/readyz")).status_code == 200
    gone = await run.remove("e0")
    assert (gone.status_code, gone.json()["id"], gone.json()["leaving"]) == (200, "e0", True)
    assert await run.ids() == []
    assert (await run.service.http.get("/readyz")).status_code == 503
    assert 'engine="e0"' not in (await run.service.http.get("/metrics")).text
    again = await run.remove("e0")
    assert (again.status_code, again.json()["engine_id"]) == (404, "e0")
    assert (await run.add(url=run.first.url)).json()["id"] == "e1"
    assert (await run.service.http.get("/readyz")).status_code == 200


async def test_the_answer_comes_when_nothing_runs_there_any_more(run: Run) -> None:
    await run.add(url=run.second.url)
    run.first.script, answer = hold()
    running = asyncio.ensure_future(generate(run.fleet))
    await run.first.wait_asked(1)
    removal = asyncio.ensure_future(run.remove("e0", "?drain_s=60"))
    await until(lambda: run.fleet.describe()[0]["leaving"])
    assert not removal.done()
    assert run.fleet.healthy_capacity() == 256
    answer.set_result(Reply())
    assert (await removal).status_code == 200
    assert (await running).attempts == 1


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_caller_that_hangs_up_does_not_undo_the_change(run: Run, method: str) -> None:
    if method == "POST":
        call = asyncio.ensure_future(run.add(url=run.second.url))
        await until(lambda: run.second.paths.total())
    else:
        run.first.script, answer = hold()
        running = asyncio.ensure_future(generate(run.fleet))
        await run.first.wait_asked(1)
        call = asyncio.ensure_future(run.remove("e0", "?drain_s=60"))
        await until(lambda: run.fleet.describe()[0]["leaving"])
    call.cancel()
    await asyncio.wait([call])
    if method == "POST":
        await until(lambda: [engine["healthy"] for engine in run.fleet.describe()] == [True, True])
    else:
        answer.set_result(Reply())
        await running
        await until(lambda: run.fleet.describe() == [])


@pytest.mark.parametrize(
    "query", ["?drain_s=-1", "?drain_s=3601", "?drain_s=1.5", "?drain_s=x", "?drain_s=", "?soon=1"]
)
async def test_another_drain_is_refused_before_anything_happens(run: Run, query: str) -> None:
    answer = await run.remove("e0", query)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-field")
    assert not run.fleet.describe()[0]["leaving"]


@pytest.mark.parametrize("id", ["e7", "E0", "e0%20", "%00", "x" * 500])
async def test_an_unknown_engine_is_a_404(run: Run, id: str) -> None:
    answer = await run.remove(id)
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")


async def test_a_change_under_way_is_answered_503_when_the_service_ends(run: Run) -> None:
    run.first.script, answer = hold()
    running = asyncio.ensure_future(generate(run.fleet))
    await run.first.wait_asked(1)
    removal = asyncio.ensure_future(run.remove("e0", "?drain_s=3600"))
    await until(lambda: run.fleet.describe()[0]["leaving"])
    await run.fleet.end_changes()
    assert (await removal).json()["type"] == "/problems/shutting-down"
    answer.set_result(Reply())
    await running


def test_the_settings_say_where_engines_may_be_added() -> None:
    assert settings_with().registration.patterns == ()
    settings = settings_with(registration={"allowed": ["http://10.0.0.0/8:8000"]})
    assert settings.registration.patterns == (read_pattern("http://10.0.0.0/8:8000"),)
