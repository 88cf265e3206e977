"""A real vLLM server as the teacher: here of its own samples, so that what it must say of them is known."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.engine.server import VllmServer
from tests.e2e.conftest import Service, wait_until
from tests.e2e.test_vllm import PROMPTS, TOLERANCE, running
from trainer_client import Group, Sample
from trainer_client.tensors import to_tensors

# The first test pays for the server's start, which takes a minute on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOP_K = 5


@pytest.fixture
def distilling(
    vllm_server: VllmServer, service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Service]:
    """Starts services whose engine is their teacher too."""

    def start(top_k: int = TOP_K, **tables: dict[str, object]) -> Service:
        monkeypatch.setenv("ROLLOUT_MODE", "distillation")
        teachers = [{"id": "itself", "url": vllm_server.url, "top_k": top_k}]
        monkeypatch.setenv("ROLLOUT_TEACHERS", json.dumps(teachers))
        return service(vllm_server.url, **tables)

    return start


def samples_of(client: Service, count: int) -> list[Group]:
    lease = client.client.lease(max_groups=count, min_groups=count, wait_s=60)
    client.client.ack(lease)
    return lease.groups


def torch_table(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """What the model itself gives every token of the vocabulary at each trained token: (T, vocabulary)."""
    ids = torch.tensor([list(sample.input_ids)])
    with torch.no_grad():
        table = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return table[torch.tensor(list(sample.completion_mask[1:])).bool()]


def test_a_teacher_with_the_engines_weights_says_of_the_sampled_tokens_what_the_engine_said(
    vllm_server: VllmServer, distilling: Callable[..., Service]
) -> None:
    running_service = distilling()
    submitted = running_service.client.submit(
        [{"prompt_id": name, "num_generations": 3, **prompt} for name, prompt in PROMPTS.items()], final=True
    )
    assert len(submitted) == 3 * len(PROMPTS)
    groups = samples_of(running_service, len(submitted))
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model, dtype=torch.float32)
    for group in groups:
        (sample,) = group.samples
        assert (sample.teacher_id, group.num_generations) == ("itself", 1)
        mask = np.asarray(sample.completion_mask, bool)
        ids, logprobs = np.asarray(sample.teacher_topk_ids), np.asarray(sample.teacher_topk_logprobs)
        assert ids.shape == logprobs.shape == (32, TOP_K + 1)
        own = np.array([row[list(i).index(t)] for row, i, t in zip(logprobs, ids, sample.input_ids[mask], strict=True)])
        if "sampling" not in PROMPTS[group.prompt_id.partition("#")[0]]:  # the teacher's are at temperature 1, always
            assert np.abs(own - sample.old_log_probs[mask]).max() < TOLERANCE
        by_torch = torch_table(model, sample)
        there = ids >= 0
        assert there.sum(1).min() >= TOP_K
        assert (logprobs[~there] == -np.inf).all()
        expected = by_torch.gather(-1, torch.tensor(np.maximum(ids, 0), dtype=torch.int64)).numpy()
        assert np.abs(expected[there] - logprobs[there]).max() < TOLERANCE
        assert np.array_equal(np.sort(logprobs)[:, ::-1], logprobs)
        # The TOP_K most likely of all are among them: what they weigh is what torch's weigh.
        assert np.abs(by_torch.topk(TOP_K).values.numpy() - logprobs[:, :TOP_K]).max() < TOLERANCE

    batch = to_tensors(groups, 0)
    trained = batch["completion_mask"].bool()
    assert batch["teacher_topk_ids"].shape == (*trained.shape, TOP_K + 1)
    assert ((batch["teacher_topk_ids"] == batch["input_ids"][..., None]).sum(-1)[trained] == 1).all()
    assert (batch["teacher_topk_ids"][~trained] == -1).all()


def test_a_top_k_beyond_the_servers_bound_drops_the_sample_and_says_how_to_raise_it(
    distilling: Callable[..., Service],
) -> None:
    client = distilling(top_k=21).client
    (submitted,) = client.submit([{"prompt": "a", "num_generations": 1}])
    wait_until(lambda: client.group(submitted.group_id).state == "dropped", 60, lambda: client.status())
    facts = client.group(submitted.group_id).facts
    assert "Requested prompt logprobs of 21, which is greater than max allowed: 20" in str(facts)
    assert "--max-logprobs" in str(facts)


def test_a_bump_while_the_teacher_reads_makes_it_stop(
    vllm_server: VllmServer, distilling: Callable[..., Service]
) -> None:
    client = distilling(groups={"max_staleness": 0}, sampling={"max_tokens": 1}).client
    wait_until(lambda: running(vllm_server.url) == 0, 30, lambda: running(vllm_server.url))
    row = {"prompt_token_ids": [7] * 40_000, "num_generations": 1}  # half a minute of reading
    (submitted,) = client.submit([row])
    wait_until(lambda: client.group(submitted.group_id).state == "scoring", 60, lambda: client.status())
    wait_until(lambda: running(vllm_server.url) == 1, 30, lambda: running(vllm_server.url))
    assert client.post_version(1).stale_groups == 1
    wait_until(lambda: running(vllm_server.url) == 0, 10, lambda: running(vllm_server.url))
    assert client.group(submitted.group_id).state == "stale"
