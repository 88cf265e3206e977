"""The progress bar of a loop over leases: what it counts, what it says, how it ends. What it draws is read as a person
would see it on a terminal."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest

from tests.client_script import DRIVERS, ScriptedService, group, sample
from trainer_client import RolloutClient

REQUIRES_TQDM = "the bar is drawn with tqdm, which this environment lacks"
PROBE = """
import sys
import trainer_client, trainer_client.loops, trainer_client.progress
print(*sorted({"httpx", "numpy", "torch", "asyncio", "tqdm"} & set(sys.modules)))
with trainer_client.RolloutClient("http://127.0.0.1:1") as client:
    client.leases(), client.prefetch()
print(*sorted({"numpy", "torch", "tqdm"} & set(sys.modules)))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The lines of the screen: a carriage return goes back, what is written goes over what was there."""
        seen = []
        for raw in self.getvalue().split("\n"):
            line = ""
            for part in raw.split("\r"):
                line = part + line[len(part) :]
            seen.append(line.rstrip())
        return [line for line in seen if line]


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    service = ScriptedService(ready=[group(f"g{i}") for i in range(5)]).start()
    yield service
    service.stop()


@pytest.fixture
def terminal() -> Terminal:
    pytest.importorskip("tqdm", reason=REQUIRES_TQDM)
    return Terminal()


@pytest.fixture(params=DRIVERS, ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, service: ScriptedService) -> Iterator[Any]:
    client = request.param(service.url, retry_for_s=20.0, timeout_s=10.0)
    yield client
    client.close()


def by_leases(client: Any, train: Callable[[Any], None], **options: Any) -> None:
    for lease in client.leases(progress=True, **options):
        train(lease)


def by_prefetch(client: Any, train: Callable[[Any], None], **options: Any) -> None:
    with client.prefetch(progress=True, **options) as leases:
        for lease in leases:
            train(lease)


@pytest.fixture(params=[by_leases, by_prefetch], ids=["leases", "prefetch"])
def loop(request: pytest.FixtureRequest, terminal: Terminal) -> Callable[..., None]:
    """Runs a loop to its end with stderr on the terminal, or on `stderr`."""

    def run(*args: Any, stderr: io.StringIO = terminal, **options: Any) -> None:
        with redirect_stderr(stderr):
            request.param(*args, **options)

    return run


def nothing(lease: Any) -> None:
    """A training step."""


def test_the_bar_counts_acked_groups_and_knows_the_total_at_the_end(client, loop, terminal):
    loop(client, nothing, max_groups=2)
    (line,) = terminal.lines()
    assert line.startswith("acked: 100%")
    assert "5/5" in line
    assert terminal.getvalue().endswith("\n")


def test_the_bar_says_version_staleness_reward_and_how_long_the_trainer_waited(client, service, loop, terminal):
    service.version, service.max_staleness = 7, 3
    rows = [sample(0, reward=1.0), sample(1, reward=0.25), sample(2, reward=None, scored=False)]
    service.ready = [group("g0", 6, rows) | {"staleness": 1}, group("g1", 5) | {"staleness": 2}]
    loop(client, nothing, max_groups=2)
    (line,) = terminal.lines()
    assert "version=7, staleness=1.50, reward=0.812, waited=" in line  # of 1, 0.25, 1 and 1
    assert re.search(r"waited=\d+\.\d\ds \(\d+%\)", line)


def test_groups_nobody_scored_have_no_mean_reward(client, service, loop, terminal):
    service.ready = [group("g0", samples=[sample(0, reward=None, scored=False)])]
    loop(client, nothing)
    assert "reward=none" in terminal.lines()[0]


def test_what_the_trainer_acks_by_hand_counts_once_and_what_it_releases_does_not(client, service, loop, terminal):
    def train(lease: Any) -> None:
        client.ack(lease, ["g0"])
        client.ack(lease, ["g0"])
        client.release(lease, ["g1", "g2"])

    loop(client, train, max_groups=5)
    assert service.acked == ["g0", "g3", "g4"]
    assert "3/3" in terminal.lines()[0]


def test_groups_that_were_lost_before_their_ack_do_not_count(client, service, loop, terminal):
    def train(lease: Any) -> None:
        next(iter(service.leases.values())).open.discard("g1")

    loop(client, train, max_groups=5)
    assert "4/4" in terminal.lines()[-1]


def test_an_exception_closes_the_bar_where_it_stands(client, loop, terminal):
    def train(lease: Any) -> None:
        if lease.groups[0].group_id == "g2":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop(client, train, max_groups=2)
    client.close()  # closes an asyncio loop's iterator
    (line,) = terminal.lines()
    assert line.startswith("acked: 2 groups")
    assert terminal.getvalue().endswith("\n")
    assert logging.getLogger("trainer_client").filters == []


def test_two_loops_of_one_client_count_apart(service, terminal):
    service.ready.append(group("g5"))
    with RolloutClient(service.url) as client, redirect_stderr(terminal):
        first, second = client.leases(max_groups=2, progress=True), client.leases(max_groups=1, progress=True)
        next(first), next(second), next(first), next(second)
        first.close(), second.close()
    counts = re.findall(r"acked: (\d+) groups", terminal.getvalue())
    assert {"1", "2"} < set(counts)
    assert "3" not in counts


def test_the_clients_own_log_lines_do_not_run_into_the_bar(client, loop, terminal):
    handler = logging.StreamHandler(terminal)
    logger = logging.getLogger("trainer_client")

    def train(lease: Any) -> None:
        logger.warning("the service is away")

    logger.addHandler(handler)
    try:
        loop(client, train, max_groups=2)
    finally:
        logger.removeHandler(handler)
    *said, bar = terminal.lines()
    assert said == ["the service is away"] * 3
    assert "5/5" in bar


def test_where_stderr_is_no_terminal_nothing_is_written_and_the_loop_is_the_same(client, service, loop):
    log = io.StringIO()
    loop(client, nothing, max_groups=2, stderr=log)
    assert log.getvalue() == ""
    assert len(service.acked) == 5


def test_without_tqdm_the_error_says_what_to_install_and_nothing_is_leased(client, service, loop, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        loop(client, nothing)
    assert service.leases == {}
    for lease in client.leases(max_groups=5):
        assert len(lease.groups) == 5


def test_neither_the_package_nor_a_loop_without_a_bar_imports_tqdm():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout == "\n\n"
