"""`POST /policy_version` with weights: what reaches the engines, and when the version rises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout_service.core.model import WeightUpdate
from rollout_service.errors import EnginesBehind
from rollout_service.orchestrator.policy_updates import check_path
from tests.api.conftest import Service, settings_with
from tests.engine_fleets import until


@pytest.fixture
async def loading() -> AsyncIterator[Service]:
    service = Service(settings=settings_with(weights={"allowed_paths": ["/ckpt", "/adapters/run"]}))
    async with service.in_process() as service:
        yield service


async def version_of(service: Service) -> int:
    found: int = (await service.http.get("/policy_version")).json()["version"]
    return found


async def test_the_version_rises_after_the_engines_have_loaded(loading: Service) -> None:
    versions: list[int] = []

    async def loads(update: WeightUpdate) -> list[str]:
        versions.append(loading.door.version)
        return []

    loading.fleet.loads = loads
    answer = await loading.post("/policy_version", {"version": 8, "weights": {"path": "/ckpt/8"}})
    assert answer.json() == {"version": 8, "previous": 0, "stale_groups": 0, "aborted_rollouts": 0}
    assert loading.fleet.updates == [WeightUpdate(version=8, path="/ckpt/8")]
    assert versions == [0]


async def test_engines_that_were_out_before_and_stay_behind_are_told(loading: Service) -> None:
    async def loads(update: WeightUpdate) -> list[str]:
        return ["e1"]

    loading.fleet.loads = loads
    answer = await loading.post("/policy_version", {"version": 8, "weights": {"path": "/ckpt/8"}})
    assert (answer.status_code, answer.json()["behind_engines"]) == (200, ["e1"])


async def test_an_adapter_goes_by_its_name(loading: Service) -> None:
    body = {"version": 8, "lora": {"name": "policy-v8", "path": "/adapters/run/8"}}
    assert (await loading.post("/policy_version", body)).status_code == 200
    assert loading.fleet.updates == [WeightUpdate(version=8, path="/adapters/run/8", lora_name="policy-v8")]


async def test_an_engine_that_did_not_follow_is_named_and_the_version_stays(loading: Service) -> None:
    async def loads(update: WeightUpdate) -> list[str]:
        raise EnginesBehind("e1 (http://b) did not load", engines=[{"id": "e1", "url": "http://b", "error": "disk"}])

    loading.fleet.loads = loads
    answer = await loading.post("/policy_version", {"version": 8, "weights": {"path": "/ckpt/8"}})
    assert answer.status_code == 502
    assert answer.json()["type"] == "/problems/engines-behind"
    assert answer.json()["engines"] == [{"id": "e1", "url": "http://b", "error": "disk"}]
    assert await version_of(loading) == 0


async def test_a_lower_version_loads_nothing_unless_it_is_a_reset(loading: Service) -> None:
    await loading.post("/policy_version", {"version": 8})
    lower = {"version": 3, "weights": {"path": "/ckpt/3"}}
    assert (await loading.post("/policy_version", lower)).status_code == 409
    assert loading.fleet.updates == []
    assert (await loading.post("/policy_version", lower | {"reset": True})).status_code == 200
    assert [update.version for update in loading.fleet.updates] == [3]
    assert await version_of(loading) == 3


@pytest.mark.parametrize(
    "path",
    ["/etc", "/ckpt/../etc", "/ckptx/8", "ckpt/8", "/adapters", "/ckpt/8/../../etc", "//ckpt/8", "s3://ckpt/8"],
)
async def test_a_path_outside_the_allow_list_reaches_no_engine(loading: Service, path: str) -> None:
    for body in ({"weights": {"path": path}}, {"lora": {"name": "a", "path": path}}):
        answer = await loading.post("/policy_version", {"version": 8, **body})
        assert answer.status_code == 403, answer.text
        assert answer.json()["type"] == "/problems/path-not-allowed"
    assert loading.fleet.updates == []
    assert await version_of(loading) == 0


async def test_without_an_allow_list_nothing_is_loaded_and_the_setting_is_named(service: Service) -> None:
    answer = await service.post("/policy_version", {"version": 8, "weights": {"path": "/ckpt/8"}})
    assert answer.status_code == 403
    assert "weights.allowed_paths" in answer.json()["detail"]


@pytest.mark.parametrize(
    "more",
    [
        {"weights": {"path": "/ckpt/8"}, "lora": {"name": "a", "path": "/ckpt/8"}},
        {"weights": {"path": ""}},
        {"weights": {"path": "/ckpt/\n8"}},
        {"weights": {"path": 8}},
        {"weights": {}},
        {"weights": "/ckpt/8"},
        {"weights": {"path": "/ckpt/8", "name": "a"}},
        {"lora": {"path": "/ckpt/8"}},
        {"lora": {"name": "", "path": "/ckpt/8"}},
    ],
)
async def test_another_shape_is_refused(loading: Service, more: dict[str, Any]) -> None:
    answer = await loading.post("/policy_version", {"version": 8} | more)
    assert answer.status_code == 422, answer.text
    assert loading.fleet.updates == []


def test_a_symbolic_link_leads_nowhere_else(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    (allowed / "8").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (allowed / "out").symlink_to(tmp_path / "secret")
    check_path(str(allowed / "8"), [str(allowed)])
    with pytest.raises(Exception, match="lies in none"):
        check_path(str(allowed / "out"), [str(allowed)])


def test_the_allowed_folder_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "disk" / "8").mkdir(parents=True)
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk")
    check_path(str(tmp_path / "ckpt" / "8"), [str(tmp_path / "ckpt")])


async def test_updates_run_one_after_the_other_and_end_at_the_highest_version(loading: Service) -> None:
    at_once, most = 0, 0

    async def loads(update: WeightUpdate) -> list[str]:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return []

    loading.fleet.loads = loads
    bodies = [{"version": version, "weights": {"path": f"/ckpt/{version}"}} for version in (2, 5, 3, 4)]
    answers = await asyncio.gather(*(loading.post("/policy_version", body) for body in bodies))
    assert most == 1
    assert await version_of(loading) == 5
    told = {body["version"]: answer.status_code for body, answer in zip(bodies, answers, strict=True)}
    assert told[5] == 200
    assert set(told.values()) <= {200, 409}


async def test_an_update_goes_on_when_its_caller_hangs_up() -> None:
    began, go_on = asyncio.Event(), asyncio.Event()

    async def loads(update: WeightUpdate) -> list[str]:
        began.set()
        await go_on.wait()
        return []

    service = Service(settings=settings_with(weights={"allowed_paths": ["/ckpt"]}))
    service.fleet.loads = loads
    async with service.running() as live:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{live.port}") as caller:
            body = {"version": 8, "weights": {"path": "/ckpt/8"}}
            asking = asyncio.create_task(caller.post("/policy_version", json=body))
            await began.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        go_on.set()
        await until(lambda: live.door.version == 8)
        # The caller asks again, as a client does whose answer was lost.
        assert (await live.post("/policy_version", body)).json()["previous"] == 8


async def test_a_service_that_ends_begins_no_update(loading: Service) -> None:
    await loading.context.updates.stop()
    answer = await loading.post("/policy_version", {"version": 8, "weights": {"path": "/ckpt/8"}})
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/shutting-down")
    assert loading.fleet.updates == []


async def test_an_engine_that_is_behind_is_shown_in_engines_and_in_the_metric(loading: Service) -> None:
    engine = {"url": "http://engine", "healthy": True, "in_flight": 0, "max_inflight": 64}
    told = [engine | {"id": "e0", "behind": False}, engine | {"id": "e1", "behind": True, "weight_version": "default"}]
    loading.fleet.describe = lambda: told  # type: ignore[method-assign]  # what a fleet tells is what is tested
    assert (await loading.http.get("/engines")).json()["engines"] == told
    assert await loading.counter('rollout_engine_behind{engine="e0"}') == 0
    assert await loading.counter('rollout_engine_behind{engine="e1"}') == 1
