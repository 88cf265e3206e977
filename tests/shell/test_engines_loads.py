"""Reading an engine's load from its metrics page."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.loads import LoadReport, read_load
from tests.simulator_caller import Caller, simulators

PAGE = b"""\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 12489.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:num_preemptions_total{engine="0",model_name="tiny"} 7.0
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.7645e+09
vllm:request_num_preemptions_sum{engine="0",model_name="tiny"} 9.0
"""


def test_a_page_of_vllm_is_read() -> None:
    assert read_load(PAGE) == LoadReport(running=3, waiting=2, kv_usage=0.25, preemptions=7)


def test_engines_behind_one_server_are_added_up_and_the_fullest_cache_counts() -> None:
    second = PAGE.replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.75")
    assert read_load(PAGE + second) == LoadReport(running=6, waiting=4, kv_usage=0.75, preemptions=14)


def test_the_older_name_of_the_cache_usage_is_known() -> None:
    older = PAGE.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc")
    assert read_load(older) == read_load(PAGE)


def test_what_an_engine_does_not_say_of_its_cache_counts_as_nothing() -> None:
    assert read_load(b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0") == LoadReport(running=1, waiting=0)


@pytest.mark.parametrize("name", [b"vllm:num_requests_running", b"vllm:num_requests_waiting{"])
def test_without_running_or_waiting_there_is_no_report(name: bytes) -> None:
    assert read_load(PAGE.replace(name, b"x" + name)) is None


@pytest.mark.parametrize("raw", [b"", b"\n", b"<html>busy</html>", b"\xff\xfe\x00", b'{"detail":"Not Found"}'])
def test_another_page_is_no_report(raw: bytes) -> None:
    assert read_load(raw) is None


@pytest.mark.parametrize(
    "value", [b"NaN", b"+Inf", b"-Inf", b"1e999", b"-1", b"", b"1.2.3", b"e", b"--", b"0x10", b"1_0"]
)
def test_a_value_that_is_no_count_is_as_good_as_none(value: bytes) -> None:
    assert read_load(PAGE.replace(b"} 3.0", b"} " + value)) is None
    other = read_load(PAGE.replace(b"} 0.25", b"} " + value))
    assert other == LoadReport(running=3, waiting=2, kv_usage=0.0, preemptions=7)


def test_a_usage_above_one_is_one() -> None:
    report = read_load(PAGE.replace(b"} 0.25", b"} 25"))
    assert report is not None
    assert report.kv_usage == 1.0


@pytest.mark.parametrize(
    "label", [b"a}b", b'a\\"} 9 b', b"a b", b"", b"a,b=c", b"\xc3\xa9", b"vllm:num_requests_waiting 5"]
)
def test_a_label_may_hold_anything(label: bytes) -> None:
    assert read_load(PAGE.replace(b"tiny", label)) == read_load(PAGE)


def test_timestamps_and_carriage_returns_change_nothing() -> None:
    assert read_load(PAGE.replace(b".0\n", b".0 1764500000000\r\n")) == read_load(PAGE)


@given(st.binary(max_size=300), st.integers(0, len(PAGE)), st.integers(0, 40))
def test_no_page_raises(noise: bytes, at: int, cut: int) -> None:
    report = read_load(PAGE[:at] + noise + PAGE[at + cut :])
    assert report is None or (report.running >= 0 and 0 <= report.kv_usage <= 1)


@given(st.lists(st.sampled_from([b'"', b"\\", b"{", b"}", b"\nvllm:num_requests_running", b" ", b"1"]), max_size=4000))
def test_no_page_takes_long(pieces: list[bytes]) -> None:
    # Quadratic matching of such pieces would take minutes and run into the time limit of the test.
    read_load(b"".join(pieces) * 20)


async def test_the_simulated_engine_is_read_as_a_real_one_is() -> None:
    async with simulators() as start:
        caller = await start(latency=5.0)
        running = asyncio.ensure_future(caller.complete("X", prompt=[1, 2], max_tokens=400, min_tokens=400))
        async with asyncio.timeout(10):
            while (report := await _report(caller)) == LoadReport(running=0, waiting=0):
                await asyncio.sleep(0.01)
        running.cancel()
    assert report is not None
    assert (report.running, report.waiting) == (1, 0)
    assert 0 < report.kv_usage < 1


async def _report(caller: Caller) -> LoadReport | None:
    async with caller.session.get(f"{caller.sim.url}/metrics") as response:
        return read_load(await response.read())
