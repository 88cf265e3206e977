"""Aborting what became stale: one call to each engine before the tasks are cancelled, and what engines make of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rollout_service.engines import Answer, Fleet
from tests.engine_fleets import Counted, ask, fleet_of, generate, until
from tests.engine_script import Reply, ScriptedEngine, hold


def rollout(row: int) -> str:
    return f"g-1.1.{row}"


async def begun(fleet: Fleet, engine: ScriptedEngine, rows: int) -> list[asyncio.Task[Answer]]:
    requests = [replace(ask(), tag=rollout(row), rollout=rollout(row)) for row in range(rows)]
    tasks = [asyncio.ensure_future(generate(fleet, request)) for request in requests]
    await engine.wait_asked(rows)
    return tasks


async def test_one_call_names_all_and_what_the_engine_then_answers_is_nobodys() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events) as fleet:
        engine.script, reply = hold()
        tasks = await begun(fleet, engine, 5)
        await fleet.abort([rollout(row) for row in range(4)])
        assert engine.aborts == [[asked.abort_id for asked in engine.asked[:4]]]
        reply.set_result(Reply(finish_reason="abort"))
        ended = await asyncio.gather(*tasks[:4], return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
        await until(lambda: len(engine.asked) > 5)  # the fifth was nobody's to abort: it is asked again
        assert {asked.request_id.rpartition("-")[0] for asked in engine.asked[5:]} == {rollout(4)}
        assert events.aborts == 4
        tasks[4].cancel()
        await asyncio.wait(tasks[4:])


async def test_connections_whose_answer_came_are_used_again() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, reply = hold()
        tasks = await begun(fleet, engine, 3)
        peers = {asked.peer for asked in engine.asked}
        await fleet.abort([rollout(row) for row in range(3)])
        reply.set_result(Reply(finish_reason="abort"))
        await asyncio.wait(tasks)
        engine.script = lambda asked: Reply()
        await generate(fleet)
        assert engine.asked[-1].peer in peers


async def test_a_completion_that_beats_its_abort_is_not_taken_for_one() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, reply = hold()
        tasks = await begun(fleet, engine, 1)
        await fleet.abort([rollout(0)])
        reply.set_result(Reply())
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert len(engine.asked) == 1


async def test_cancelling_after_the_call_closes_the_connection_and_repeats_only_what_was_young() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        tasks = await begun(fleet, engine, 2)
        await fleet.abort([rollout(0), rollout(1)])
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await engine.wait_for(lambda: all(asked.outcome == "disconnected" for asked in engine.asked))
        both = [asked.abort_id for asked in engine.asked]
        await until(lambda: len(engine.aborts) == 2)  # once more, for it may have overtaken its request
        assert engine.aborts == [both, both]


@pytest.mark.parametrize("reply", [Reply(cut=True), Reply(cut_inside=True), Reply(status=500), Reply(body=b"{")])
async def test_whatever_an_engine_makes_of_our_abort_says_nothing_against_it(reply: Reply) -> None:
    async with ScriptedEngine() as engine, fleet_of(engine) as fleet:
        engine.script, answer = hold()
        tasks = await begun(fleet, engine, 6)
        await fleet.abort([rollout(row) for row in range(6)])
        answer.set_result(reply)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in ended)
        (state,) = fleet.describe()
        assert state["healthy"]
        assert not state["doubtful"]
        assert len(engine.asked) == 6, "and nothing of it is asked again"


async def test_those_who_wait_for_a_slot_do_not_take_the_ones_that_aborts_free() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=2) as fleet:
        engine.script, reply = hold()
        requests = [replace(ask(), tag=rollout(row), rollout=rollout(row)) for row in range(8)]
        tasks = [asyncio.ensure_future(generate(fleet, request)) for request in requests]
        await engine.wait_asked(2)
        await fleet.abort([rollout(row) for row in range(8)])
        reply.set_result(Reply(finish_reason="abort"))
        await asyncio.wait(tasks)
        assert len(engine.asked) == 2
        assert fleet.describe()[0]["in_flight"] == 0


async def test_an_engine_without_an_abort_route_is_called_for_nothing() -> None:
    async with ScriptedEngine(dev_mode=False) as engine, fleet_of(engine) as fleet:
        engine.script, _ = hold()
        tasks = await begun(fleet, engine, 1)
        before = dict(engine.paths)
        await fleet.abort([rollout(0)])
        assert dict(engine.paths) == before
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await engine.wait_for(lambda: engine.asked[0].outcome == "disconnected")


async def test_an_abort_call_that_fails_is_counted_and_cancelling_still_ends_the_request() -> None:
    events = Counted()
    async with ScriptedEngine() as engine, fleet_of(engine, events=events) as fleet:
        engine.abort_status = 500
        engine.script, _ = hold()
        tasks = await begun(fleet, engine, 1)
        await fleet.abort([rollout(0)])
        assert events.failed_aborts == 1
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await engine.wait_for(lambda: engine.asked[0].outcome == "disconnected")


async def test_what_waits_for_a_slot_has_nothing_to_abort() -> None:
    async with ScriptedEngine() as engine, fleet_of(engine, max_inflight=1) as fleet:
        engine.script, reply = hold()
        first = await begun(fleet, engine, 1)
        waiting = asyncio.ensure_future(generate(fleet, replace(ask(), rollout=rollout(1))))
        await asyncio.sleep(0)
        await fleet.abort([rollout(1)])
        assert engine.aborts == []
        waiting.cancel()
        reply.set_result(Reply())
        await asyncio.gather(*first)
        assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
