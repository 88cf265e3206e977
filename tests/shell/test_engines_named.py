"""Engines that the configuration or a list names, and that somebody removed by hand."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_service.engines import EngineSpec, Fleet, FleetSettings
from rollout_service.engines.fleet import id_by_address
from rollout_service.errors import Conflict, EngineNotAllowed
from rollout_service.settings.registration import read_pattern
from tests.engine_fleets import fleet_of, generate, until
from tests.engine_script import Reply, ScriptedEngine, hold

LOOPBACK = (read_pattern("http://127.0.0.0/8:*"),)
QUICK = FleetSettings(
    probe_interval_s=0.05, engine_wait_s=5.0, request_timeout_s=10.0, discovery_interval_s=0.05, ids_by_address=True
)


def listed(path: Path, *urls: str) -> None:
    """Written whole."""
    new = path.with_suffix(".new")
    new.write_text("".join(f"{url}\n" for url in ("# engines", *urls)))
    os.replace(new, path)


@pytest.mark.parametrize("addable", [(), LOOPBACK], ids=["nothing else", "others"])
async def test_one_of_the_configuration_comes_back_as_it_is_there_whatever_else_may_be_added(addable: tuple[()]):
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=3, api_key="secret", addable=addable) as fleet:
        await fleet.remove_engine("e0", drain_s=0)
        described, new = await fleet.add_engine(f"{engine.url}/")
        assert (described["url"], described["max_inflight"], described["healthy"], new) == (engine.url, 3, True, True)
        await generate(fleet)
        assert engine.asked[-1].headers["authorization"] == "Bearer secret"
        await fleet.remove_engine(described["id"], drain_s=0)
        described, _ = await fleet.add_engine(engine.url, 5)
        assert described["max_inflight"] == 5


async def test_one_that_is_still_leaving_is_asked_for_again_when_it_is_gone():
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, answer = hold()
        task = asyncio.create_task(generate(fleet))
        await engine.wait_asked(1)
        removal = asyncio.create_task(fleet.remove_engine("e0", drain_s=60))
        await until(lambda: fleet.describe()[0]["leaving"])
        with pytest.raises(Conflict, match="being removed"):
            await fleet.add_engine(engine.url)
        answer.set_result(Reply())
        await asyncio.gather(task, removal)
        assert (await fleet.add_engine(engine.url))[1]


async def test_one_that_is_there_is_no_business_of_callers_who_may_add_nothing():
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=3) as fleet:
        with pytest.raises(EngineNotAllowed):
            await fleet.add_engine(engine.url, 5)
        described, new = await fleet.add_engine(engine.url, 5, follows=True)
        assert (described["max_inflight"], new) == (5, False)
        with pytest.raises(EngineNotAllowed):
            await fleet.add_engine("http://127.0.0.1:1", 5, follows=True)


async def test_one_of_a_list_comes_back_as_it_is_listed(tmp_path: Path):
    async with ScriptedEngine() as engine:
        path = tmp_path / "engines.txt"
        listed(path, engine.url)
        async with fleet_of(f"file:{path}", max_inflight=3, api_key="secret") as fleet:
            await fleet.remove_engine("e0", drain_s=0)
            assert fleet.names(engine.url)
            described, new = await fleet.add_engine(engine.url)
            assert (described["max_inflight"], new) == (3, True)
            await generate(fleet)
            assert engine.asked[-1].headers["authorization"] == "Bearer secret"


async def test_what_is_kept_out_is_not_contacted_by_a_start_nor_by_looks(tmp_path: Path):
    out: set[str] = set()
    async with ScriptedEngine() as named, ScriptedEngine() as other, ScriptedEngine() as here:
        path = tmp_path / "engines.txt"
        listed(path, other.url, here.url)
        named.models_status = 404
        out |= {named.url, other.url}
        specs = [EngineSpec(url=named.url), EngineSpec(url=f"file:{path}")]
        fleet = Fleet(specs, QUICK, kept_out=lambda url: url in out)
        await fleet.start()
        try:
            looks = here.paths["/health"]
            await until(lambda: here.paths["/health"] > looks + 3)
            assert [engine["url"] for engine in fleet.describe()] == [here.url]
            assert not named.paths
            assert not other.paths
            assert [fleet.names(url) for url in (named.url, other.url, "http://127.0.0.1:1")] == [True, True, False]
            out.clear()
            await until(lambda: {engine["url"] for engine in fleet.describe()} == {here.url, other.url})
        finally:
            await fleet.stop()


async def test_where_replicas_share_their_engines_a_removal_is_theirs_to_remember(tmp_path: Path):
    """Not this fleet's, whose looks may miss what those of the others see."""
    out: set[str] = set()
    async with ScriptedEngine() as engine, ScriptedEngine() as later:
        path = tmp_path / "engines.txt"
        listed(path, engine.url)
        fleet = Fleet([EngineSpec(url=f"file:{path}")], QUICK, kept_out=lambda url: url in out)
        await fleet.start()
        try:
            out.add(engine.url)
            await fleet.remove_engine(id_by_address(engine.url), drain_s=0)
            listed(path, engine.url, later.url)
            await until(lambda: [each["url"] for each in fleet.describe()] == [later.url])
            out.clear()
            await until(lambda: [each["url"] for each in fleet.describe()] == [later.url, engine.url])
        finally:
            await fleet.stop()


async def test_lists_that_were_not_read_yet_may_name_anything(tmp_path: Path):
    path = tmp_path / "engines.txt"
    fleet = Fleet([EngineSpec(url=f"file:{path}")], QUICK)
    await fleet.start()
    try:
        assert fleet.names("http://127.0.0.1:1") is None
        listed(path)
        await until(lambda: fleet.names("http://127.0.0.1:1") is False)
    finally:
        await fleet.stop()


async def test_one_that_was_added_by_hand_is_not_the_lists_to_remove(tmp_path: Path):
    async with ScriptedEngine() as engine, ScriptedEngine() as later:
        path = tmp_path / "engines.txt"
        listed(path, engine.url)
        fleet = Fleet([EngineSpec(url=f"file:{path}")], QUICK, kept_out=lambda url: False)
        await fleet.start()
        try:
            # Within one interval: the look after it finds the engine under the id it had.
            await fleet.remove_engine(id_by_address(engine.url), drain_s=0)
            await fleet.add_engine(engine.url)
            listed(path, later.url)
            await until(lambda: later.url in [each["url"] for each in fleet.describe()])
            assert (fleet.describe()[0]["url"], fleet.describe()[0]["leaving"]) == (engine.url, False)
        finally:
            await fleet.stop()


async def test_one_of_a_list_that_was_asked_for_too_stays_when_it_is_listed_no_more(tmp_path: Path):
    async with ScriptedEngine() as asked, ScriptedEngine() as listed_only, ScriptedEngine() as later:
        path = tmp_path / "engines.txt"
        listed(path, asked.url, listed_only.url)
        fleet = Fleet([EngineSpec(url=f"file:{path}")], replace(QUICK, addable=LOOPBACK))
        await fleet.start()
        try:
            assert not (await fleet.add_engine(asked.url))[1]
            listed(path, later.url)
            await until(lambda: {each["url"] for each in fleet.describe()} == {asked.url, later.url})
            assert not any(each["leaving"] for each in fleet.describe())
            # Once it is removed it is the list's again.
            listed(path, asked.url, later.url)
            await until(lambda: fleet.names(asked.url))
            (id_,) = [each["id"] for each in fleet.describe() if each["url"] == asked.url]
            await fleet.remove_engine(id_, drain_s=0)
            listed(path, later.url)
            await until(lambda: not fleet.names(asked.url))
            listed(path, asked.url, later.url)
            await until(lambda: len(fleet.describe()) == 2)
            listed(path, later.url)
            await until(lambda: len(fleet.describe()) == 1)
        finally:
            await fleet.stop()


def test_an_id_is_that_of_every_spelling_and_of_no_other_engine():
    same = ("http://engine", "http://ENGINE:80", "http://engine/", "http://engine:80/")
    others = ("https://engine", "http://engine:8000", "http://engine/one", "http://[::1]:8000", "http://10.0.0.1:8000")
    assert len({id_by_address(url) for url in same}) == 1
    assert len({id_by_address(url) for url in (*same, *others)}) == 1 + len(others)
