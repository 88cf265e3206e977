"""New weights through the fleet: who loads, who is left behind, who is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from rollout_service.core.model import WeightUpdate
from rollout_service.engines import EngineSpec, Fleet, FleetSettings
from rollout_service.engines.weights import FleetReports, WeightStanding
from rollout_service.errors import EnginesBehind, Unavailable
from tests.engine_fleets import generate, until
from tests.engine_script import Reply, ScriptedEngine, hold


class Run:
    """Stands for the orchestrator: the policy version."""

    version = 0


@asynccontextmanager
async def fleet_of(*engines: ScriptedEngine, run: Run, **settings: Any) -> AsyncIterator[Fleet]:
    limits: dict[str, Any] = {"probe_interval_s": 0.02, "engine_wait_s": 5.0, "weights_timeout_s": 5.0} | settings
    specs = [EngineSpec(url=engine.url) for engine in engines]
    fleet = Fleet(specs, FleetSettings(**limits), version=lambda: run.version)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[ScriptedEngine, ScriptedEngine]]:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        first.weight_version = second.weight_version = "default"
        yield first, second


def facts(fleet: Fleet, name: str) -> list[Any]:
    return [engine[name] for engine in fleet.describe()]


def update(version: int, **more: Any) -> WeightUpdate:
    return WeightUpdate(version=version, path=f"/ckpt/{version}", **more)


def fails(path: str, status: int = 500) -> Any:
    """A route that answers with an error."""

    def answer(asked: str, body: Any) -> web.Response | None:
        return web.json_response({"error": "no space left"}, status=status) if asked == path else None

    return answer


async def test_every_engine_is_paused_loads_reports_the_version_and_goes_on() -> None:
    run = Run()
    async with two() as engines, fleet_of(*engines, run=run) as fleet:
        assert await fleet.update_weights(update(8)) == []
        for engine in engines:
            assert engine.control == [
                ("/pause?mode=keep", None),
                ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/ckpt/8"}}),
                ("/update_weight_version", {"new_version": "8"}),
                ("/resume", None),
            ]
        assert facts(fleet, "weight_version") == ["8", "8"]
        assert facts(fleet, "behind") == [False, False]


@pytest.mark.parametrize("path", ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"])
async def test_an_engine_that_does_not_follow_is_named_taken_out_and_told_to_resume(path: str) -> None:
    run = Run()
    async with two() as (good, bad), fleet_of(good, bad, run=run) as fleet:
        bad.on_control = fails(path)
        with pytest.raises(EnginesBehind, match="no space left") as caught:
            await fleet.update_weights(update(1))
        assert bad.url in str(caught.value)
        assert good.url not in str(caught.value)
        assert [engine["id"] for engine in caught.value.facts["engines"]] == ["e1"]
        assert bad.control[-1][0] == "/resume"
        assert not good.paused
        assert facts(fleet, "healthy") == [True, False]
        assert facts(fleet, "behind") == [False, True]
        for _ in range(4):
            assert (await generate(fleet)).engine == good.url


async def test_it_stays_out_while_its_probes_succeed_and_the_same_call_again_goes_on_without_it() -> None:
    run = Run()
    async with two() as (good, bad), fleet_of(good, bad, run=run) as fleet:
        bad.on_control = fails("/collective_rpc")
        with pytest.raises(EnginesBehind):
            await fleet.update_weights(update(1))
        probes = bad.paths["/health"]
        await until(lambda: bad.paths["/health"] > probes + 3)
        assert facts(fleet, "healthy") == [True, False]
        assert await fleet.update_weights(update(1)) == ["e1"]
        run.version = 1
        assert facts(fleet, "behind") == [False, True]
        assert "did not load the weights of version 1" in fleet.describe()[1]["error"]


async def test_it_is_back_as_soon_as_it_loads() -> None:
    run = Run()
    async with two() as (good, bad), fleet_of(good, bad, run=run) as fleet:
        bad.on_control = fails("/collective_rpc")
        with pytest.raises(EnginesBehind):
            await fleet.update_weights(update(1))
        bad.on_control = lambda path, body: None
        assert await fleet.update_weights(update(1)) == ["e1"]
        run.version = 1
        await until(lambda: facts(fleet, "healthy") == [True, True])
        assert bad.weight_version == "1"


async def test_an_engine_that_is_out_and_hangs_does_not_hold_up_an_update() -> None:
    run = Run()

    async def hangs() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with two() as (good, bad), fleet_of(good, bad, run=run) as fleet:
        bad.on_control = fails("/pause?mode=keep")
        with pytest.raises(EnginesBehind):
            await fleet.update_weights(update(1))
        bad.on_control = lambda path, body: hangs()
        async with asyncio.timeout(5):
            assert await fleet.update_weights(update(1)) == ["e1"]


@pytest.mark.parametrize(("path", "status"), [("/collective_rpc", 400), ("/pause?mode=keep", 500)])
async def test_an_update_that_no_engine_took_and_that_changed_none_leaves_the_run_as_it_was(
    path: str, status: int
) -> None:
    run = Run()
    async with two() as engines, fleet_of(*engines, run=run) as fleet:
        await fleet.update_weights(update(1))
        run.version = 1
        for engine in engines:
            engine.on_control = fails(path, status)
        with pytest.raises(EnginesBehind, match="No engine was changed"):
            await fleet.update_weights(update(2))
        assert facts(fleet, "healthy") == [True, True]
        assert facts(fleet, "behind") == [False, False]
        assert (await generate(fleet)).turn.output_ids


async def test_the_first_update_of_a_run_with_a_mistyped_path_leaves_its_engines_in() -> None:
    async with two() as engines, fleet_of(*engines, run=Run()) as fleet:
        for engine in engines:
            engine.on_control = fails("/collective_rpc", 400)
        with pytest.raises(EnginesBehind, match="No engine was changed"):
            await fleet.update_weights(update(1))
        assert facts(fleet, "healthy") == [True, True]
        assert (await generate(fleet)).turn.output_ids


async def test_posting_the_same_version_with_another_path_does_not_make_it_the_runs() -> None:
    run = Run()
    async with two() as (stays, restarts), fleet_of(stays, restarts, run=run) as fleet:
        await fleet.update_weights(update(1))
        run.version = 1
        await fleet.update_weights(WeightUpdate(version=1, path="/ckpt/typo"), again=True)
        await restarts.stop()
        await until(lambda: facts(fleet, "healthy") == [True, False])
        restarts.weight_version = "default"
        restarts.control.clear()
        await restarts.start()
        await until(lambda: facts(fleet, "healthy") == [True, True])
        assert (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "/ckpt/1"}},
        ) in restarts.control


async def test_an_engine_that_comes_back_is_not_used_before_it_has_said_what_it_has() -> None:
    run = Run()
    async with two() as (stays, restarts), fleet_of(stays, restarts, run=run) as fleet:
        await fleet.update_weights(update(1))
        run.version = 1
        await restarts.stop()
        await until(lambda: facts(fleet, "healthy") == [True, False])
        restarts.silent = True
        await restarts.start()
        seen = restarts.paths["/weight_info"]
        await until(lambda: restarts.paths["/weight_info"] > seen + 3)
        assert facts(fleet, "healthy") == [True, False]
        restarts.silent = False
        await until(lambda: facts(fleet, "healthy") == [True, True])


async def test_a_reset_with_weights_takes_out_nobody_who_followed() -> None:
    run = Run()
    slow, go_on = asyncio.Event(), asyncio.Event()

    async def waits() -> web.Response:
        slow.set()
        await go_on.wait()
        return web.json_response({})

    async with two() as (quick, late), fleet_of(quick, late, run=run) as fleet:
        await fleet.update_weights(update(50))
        run.version = 50
        late.on_control = lambda path, body: waits() if path == "/collective_rpc" else None
        updating = asyncio.create_task(fleet.update_weights(update(40)))
        await slow.wait()
        await until(lambda: quick.weight_version == "40")
        seen = quick.paths["/weight_info"]
        await until(lambda: quick.paths["/weight_info"] > seen + 3)
        assert facts(fleet, "behind")[0] is False
        go_on.set()
        assert await updating == []


def test_where_one_engine_reports_the_run_another_that_says_less_is_behind() -> None:
    """As after a restart of the service, when nobody remembers who reported what."""
    fleet = FleetReports()
    first, second, silent = (WeightStanding(fleet) for _ in range(3))
    second.saw("default", 8)
    assert second.why_behind is None
    first.saw("8", 8)
    second.saw("default", 8)
    silent.saw(None, 8)
    assert second.why_behind is not None
    assert silent.why_behind is None, "one that never reported is used"


async def test_the_call_fails_where_nobody_followed_even_if_all_were_out_before() -> None:
    run = Run()
    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = fails("/collective_rpc")
        async with fleet_of(engine, run=run) as fleet:
            for _ in range(2):
                with pytest.raises(EnginesBehind):
                    await fleet.update_weights(update(1))


async def test_no_engine_there_is_told_apart_from_engines_that_fail() -> None:
    run = Run()
    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        async with fleet_of(engine, run=run) as fleet:
            await engine.stop()
            await until(lambda: facts(fleet, "healthy") == [False])
            with pytest.raises(Unavailable, match="no engine answers"):
                await fleet.update_weights(update(1))


async def test_an_engine_without_the_routes_is_told_what_it_needs() -> None:
    run = Run()
    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = fails("/collective_rpc", 404)
        async with fleet_of(engine, run=run) as fleet:
            with pytest.raises(EnginesBehind, match="VLLM_SERVER_DEV_MODE=1"):
                await fleet.update_weights(update(1))


async def test_a_restarted_engine_with_its_first_weights_gets_those_of_the_run_before_any_work() -> None:
    run = Run()
    async with two() as (stays, restarts), fleet_of(stays, restarts, run=run) as fleet:
        await fleet.update_weights(update(1))
        run.version = 1
        await restarts.stop()
        await until(lambda: facts(fleet, "healthy") == [True, False])
        restarts.weight_version = "default"
        restarts.control.clear()
        await restarts.start()
        await until(lambda: facts(fleet, "healthy") == [True, True])
        assert restarts.weight_version == "1"
        assert [path for path, _ in restarts.control] == [
            "/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume",
        ]  # fmt: skip


async def test_where_the_trainer_loads_the_weights_a_restarted_engine_waits_until_it_matches() -> None:
    run = Run()
    async with two() as (stays, restarts), fleet_of(stays, restarts, run=run) as fleet:
        for engine in (stays, restarts):
            engine.weight_version = "7"
        run.version = 7
        await until(lambda: facts(fleet, "weight_version") == ["7", "7"])
        await restarts.stop()
        await until(lambda: facts(fleet, "healthy") == [True, False])
        restarts.weight_version = "default"
        await restarts.start()
        await until(lambda: facts(fleet, "behind") == [False, True])
        assert facts(fleet, "healthy") == [True, False]
        assert (await generate(fleet)).engine == stays.url
        assert "reports the weights 'default'" in fleet.describe()[1]["error"]
        restarts.weight_version = "7"
        await until(lambda: facts(fleet, "healthy") == [True, True])


async def test_an_engine_ahead_of_the_run_is_not_behind() -> None:
    """A trainer loads its weights first and posts the version afterwards."""
    run = Run()
    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        async with fleet_of(engine, run=run) as fleet:
            run.version = 7
            engine.weight_version = "7"
            await until(lambda: facts(fleet, "weight_version") == ["7"])
            engine.weight_version = "8"
            await until(lambda: facts(fleet, "weight_version") == ["8"])
            assert facts(fleet, "healthy") == [True]


async def test_an_engine_that_never_reported_is_used_with_one_warning() -> None:
    run = Run()
    with capture_logs() as logs:
        async with two() as engines, fleet_of(*engines, run=run) as fleet:
            engines[0].weight_version = None
            run.version = 3
            seen = [engine.paths["/weight_info"] for engine in engines]
            await until(lambda: all(e.paths["/weight_info"] > n + 3 for e, n in zip(engines, seen, strict=True)))
            assert facts(fleet, "healthy") == [True, True]
    warned = [entry["engine"] for entry in logs if entry["event"] == "engine_reports_no_weight_version"]
    assert sorted(warned) == sorted(engine.url for engine in engines)


async def test_an_engine_that_loads_gets_no_new_work_and_what_waits_goes_out_afterwards() -> None:
    run = Run()
    loading = asyncio.Event()
    go_on = asyncio.Event()

    async def slow() -> web.Response:
        loading.set()
        await go_on.wait()
        return web.json_response({})

    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = lambda path, body: slow() if path == "/collective_rpc" else None
        async with fleet_of(engine, run=run) as fleet:
            updating = asyncio.create_task(fleet.update_weights(update(1)))
            await loading.wait()
            waiting = asyncio.create_task(generate(fleet))
            probes = engine.paths["/health"]
            await until(lambda: engine.paths["/health"] > probes + 2)
            assert not engine.asked
            go_on.set()
            await updating
            await waiting
            assert len(engine.asked) == 1


async def test_an_update_that_is_broken_off_leaves_no_engine_paused() -> None:
    run = Run()
    loading = asyncio.Event()

    async def hangs() -> web.Response:
        loading.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = lambda path, body: hangs() if path == "/collective_rpc" else None
        async with fleet_of(engine, run=run) as fleet:
            updating = asyncio.create_task(fleet.update_weights(update(1)))
            await loading.wait()
            updating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await updating
            assert engine.control[-1][0] == "/resume"
            assert not engine.paused
            assert facts(fleet, "healthy") == [False]


async def test_a_load_that_hangs_ends_after_its_time() -> None:
    run = Run()

    async def hangs() -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = lambda path, body: hangs() if path == "/collective_rpc" else None
        async with fleet_of(engine, run=run, weights_timeout_s=0.1) as fleet:
            with pytest.raises(EnginesBehind, match=r"no answer in 0\.1 s"):
                await fleet.update_weights(update(1))


async def test_again_leaves_out_who_has_the_version() -> None:
    run = Run()
    async with two() as (first, second), fleet_of(first, second, run=run) as fleet:
        await fleet.update_weights(update(1))
        run.version = 1
        for engine in (first, second):
            engine.control.clear()
        assert await fleet.update_weights(update(1), again=True) == []
        assert first.control == second.control == []


async def test_an_adapter_is_loaded_in_place_where_it_is_there_and_unloaded_when_no_request_can_name_it() -> None:
    run = Run()
    loaded: set[str] = set()

    def adapters(path: str, body: Any) -> web.Response | None:
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in loaded and not body.get("load_inplace"):
                message = f"The lora adapter '{body['lora_name']}' has already been loaded."
                return web.json_response({"error": {"message": message, "code": 400}}, status=400)
            loaded.add(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            loaded.remove(body["lora_name"])
        return None

    async with ScriptedEngine() as engine:
        engine.weight_version = "default"
        engine.on_control = adapters
        async with fleet_of(engine, run=run, adapters_kept=2) as fleet:
            for version in (1, 1, 2, 3):
                await fleet.update_weights(update(version, lora_name=f"policy-v{version}"))
            assert loaded == {"policy-v2", "policy-v3"}


async def test_a_model_name_with_the_version_in_it_follows_the_run_and_a_retry_too() -> None:
    run = Run()
    run.version = 1
    async with ScriptedEngine() as engine, fleet_of(engine, run=run, model="policy-v{policy_version}") as fleet:
        script, reply = hold()
        engine.script = script
        asked = asyncio.create_task(generate(fleet))
        await engine.wait_asked(1)
        run.version = 2
        engine.script = lambda asked: Reply()
        reply.set_result(Reply(status=503))
        await asked
        assert [each.body["model"] for each in engine.asked] == ["policy-v1", "policy-v2"]


@pytest.mark.parametrize(
    ("seen", "behind"),
    [
        ([("default", 0)], False),
        ([("default", 5)], False),
        ([("0", 0), ("default", 0)], False),
        ([("5", 5), ("default", 5)], True),
        ([("5", 5), (None, 5)], True),
        ([("5", 5), ("4", 5)], True),
        ([("5", 5), ("5", 6)], True),
        ([("5", 5), ("6", 5)], False),
        ([("5", 5), ("default", 5), ("5", 5)], False),
        ([("5", 5), ("\u0665", 5)], True),
    ],
)
def test_who_is_behind(seen: list[tuple[str | None, int]], behind: bool) -> None:
    standing = WeightStanding()
    for reported, current in seen:
        standing.saw(reported, current)
    assert (standing.why_behind is not None) is behind


def test_who_missed_an_update_is_behind_until_it_reports_something_else() -> None:
    standing = WeightStanding()
    standing.saw("7", 7)
    standing.missed(8, "no space left")
    standing.saw("7", 7)
    assert standing.why_behind == "it did not load the weights of version 8: no space left"
    standing.saw("8", 7)
    assert standing.why_behind is None
    standing.missed(9, "gone")
    standing.saw("default", 8)
    assert standing.why_behind is not None
    standing.loaded(9)
    assert standing.why_behind is None
