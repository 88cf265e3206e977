"""Ranks as processes over gloo, the real service, the engine simulator: every group is trained once, all end together.

`python -m tests.e2e.test_data_parallel '{…}'` is one rank: it writes a line of JSON a step, with the ids of its groups.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from examples.engine.server import MODEL_NAME
from examples.processes import Process, free_port
from tests.e2e.conftest import REPOSITORY, Service, wait_until
from trainer_client import RolloutClient

pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")

WITHIN_S = 180.0
"""Ranks import torch, which takes long where others have the cores."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "rollout_service", "simulate-engine", "--port", str(port), "--model", MODEL_NAME]
    with Process("engine", [*command, "--mean-tokens", "8"], tmp_path / "engine.log", cwd=REPOSITORY) as process:
        process.wait_ready(f"http://127.0.0.1:{port}/health", WITHIN_S)
        yield f"http://127.0.0.1:{port}"


class Ranks:
    """`world` processes that train together; `steps[rank]` is what each of them saw, step by step."""

    def __init__(self, folder: Path, world: int) -> None:
        folder.mkdir()
        self.folder, self.world = folder, world
        self.started: list[Process] = []

    def run(self, url: str, **options: Any) -> list[int]:
        """Start them and wait for all; their exit codes."""
        meeting = f"file://{self.folder / 'meeting'}"
        try:
            for rank in range(self.world):
                told = {"url": url, "rank": rank, "world": self.world, "meeting": meeting} | options
                command = [sys.executable, "-m", "tests.e2e.test_data_parallel", json.dumps(told)]
                # The loopback interface: gloo would look the machine's name up.
                environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
                process = Process(f"rank {rank}", command, self._log(rank), env=environ, cwd=REPOSITORY)
                self.started.append(process)
            return [process.popen.wait(WITHIN_S) for process in self.started]
        except subprocess.TimeoutExpired:
            pytest.fail("the ranks did not end")
        finally:
            for process in self.started:
                process.stop()
                print(f"--- {process.name}\n{process.tail()}")

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    @property
    def lines(self) -> list[list[dict[str, Any]]]:
        """What each rank reported."""
        logs = [self._log(rank).read_text().splitlines() for rank in range(self.world)]
        return [[json.loads(line) for line in log if line.startswith("{")] for log in logs]

    @property
    def steps(self) -> list[list[list[str]]]:
        return [[line["groups"] for line in mine] for mine in self.lines]

    @property
    def trained(self) -> Counter[str]:
        """How often each group was trained, over all ranks."""
        return Counter(name for mine in self.steps for step in mine for name in step)


def submit(client: RolloutClient, count: int) -> list[str]:
    return [row.group_id for row in client.submit([{"prompt": f"Question {n}."} for n in range(count)], final=True)]


def counts(service: Service) -> dict[str, int]:
    return {state: number for state, number in service.client.status().groups.items() if number}


@pytest.mark.timeout(600)
def test_every_group_is_trained_once_over_all_ranks_and_all_end_together(
    engine: str, service: Callable[..., Service], tmp_path: Path
) -> None:
    running = service(engine)
    submitted = submit(running.client, 10)
    ranks = Ranks(tmp_path / "ranks", 3)
    assert ranks.run(running.url, groups_per_step=4) == [0, 0, 0]
    assert ranks.trained == Counter(submitted)
    assert [[len(step) for step in mine] for mine in ranks.steps] == [[2, 2, 1], [1, 1, 1], [1, 1, 0]]
    assert counts(running) == {"acked": 10}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_even_ranks_train_equal_shares_and_leave_the_rest_ready(
    engine: str, service: Callable[..., Service], tmp_path: Path
) -> None:
    running = service(engine)
    submitted = submit(running.client, 8)
    ranks = Ranks(tmp_path / "ranks", 3)
    assert ranks.run(running.url, groups_per_step=4, even=True) == [0, 0, 0]
    assert [[len(step) for step in mine] for mine in ranks.steps] == [[1, 1]] * 3
    assert len(ranks.trained) == 6
    assert set(ranks.trained) < set(submitted)
    assert counts(running) == {"acked": 6, "ready": 2}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("killed", "lease_s"),
    [
        pytest.param(0, 3, id="rank 0: when the lease runs out"),
        pytest.param(1, 600, id="another: rank 0 gives them back as it leaves"),
    ],
)
def test_the_groups_of_a_killed_rank_come_back(
    engine: str, service: Callable[..., Service], tmp_path: Path, killed: int, lease_s: int
) -> None:
    running = service(engine)
    submitted = submit(running.client, 8)
    first = Ranks(tmp_path / "first", 2)
    codes = first.run(running.url, groups_per_step=4, lease_s=lease_s, killed=killed, at_step=2)
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 1
    acked = {name for mine in first.steps for name in mine[0]}
    in_hand = {name for mine in first.steps for name in mine[1]}
    assert len(acked) == len(in_hand) == 4
    wait_until(lambda: counts(running) == {"acked": 4, "ready": 4}, WITHIN_S, lambda: counts(running))

    second = Ranks(tmp_path / "second", 2)
    assert second.run(running.url, groups_per_step=4) == [0, 0]
    assert second.trained == Counter(in_hand)
    assert counts(running) == {"acked": 8}
    assert acked | in_hand == set(submitted)


@pytest.mark.timeout(600)
def test_the_example_of_the_package_trains_the_same_weights_on_every_rank(
    engine: str, service: Callable[..., Service], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (in the dev lock)")
    running = service(engine)
    submit(running.client, 8)
    ranks = Ranks(tmp_path / "ranks", 2)
    assert ranks.run(running.url, example=True, port=free_port()) == [0, 0]
    first, second = ranks.lines
    assert first == second
    assert first[0]["weights"] != first[1]["weights"]
    assert counts(running) == {"acked": 8}
    assert running.client.version().version == 2


def the_example(url: str, rank: int, world: int, port: int) -> None:
    """Run what the docstring of `trainer_client.tensors` shows, on CPU cores, with a tiny model."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import Qwen2Config, Qwen2ForCausalLM

    import trainer_client.tensors

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shown = str(trainer_client.tensors.__doc__)
    begin = shown.index("    import torch.distributed")
    code = textwrap.dedent(shown[begin : shown.index("\n\n(With", begin)])
    for was, becomes in (("http://127.0.0.1:8080", url), ("groups_per_step=32", "groups_per_step=4"), ("cuda", "cpu")):
        assert was in code
        code = code.replace(was, becomes)
    setup, loop, body = code.partition("for version")

    names: dict[str, Any] = {}
    exec(setup, names)  # noqa: S102  (this repository's own text)
    torch.manual_seed(rank)  # what differs at first is made equal by DistributedDataParallel
    tiny = Qwen2Config(
        vocab_size=300_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=4096,
    )  # fmt: skip
    names["model"] = DistributedDataParallel(Qwen2ForCausalLM(tiny))
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=1.0)

    def report() -> None:
        print(json.dumps({"weights": sum(p.double().sum().item() for p in names["model"].parameters())}), flush=True)

    report()
    exec(loop + body, names)  # noqa: S102  (this repository's own text)
    report()
    names["client"].close()
    dist.destroy_process_group()


def one_rank(told: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from trainer_client.tensors import RolloutDataset

    rank, killed, at_step = told["rank"], told.pop("killed", None), told.pop("at_step", None)
    meeting, url, world = told.pop("meeting"), told.pop("url"), told.pop("world")
    del told["rank"]
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=WITHIN_S)
    )
    with RolloutClient(url) as client:
        for step, groups in enumerate(RolloutDataset(client, **told), start=1):
            # What a training step has: a collective that every rank has to take part in, whatever its share.
            total = torch.tensor(len(groups))
            dist.all_reduce(total)
            print(json.dumps({"groups": [group.group_id for group in groups]}), flush=True)
            assert total.item() > 0
            dist.barrier()
            if rank == killed and step == at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                client.post_version(client.version().version + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    if arguments.pop("example", False):
        del arguments["meeting"]
        the_example(**arguments)
    else:
        one_rank(arguments)
