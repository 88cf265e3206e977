"""The service on a real vLLM server: what is leased is what the engine did, and a bump really stops it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.engine.server import VllmServer
from tests.e2e.conftest import Service, wait_until
from trainer_client import Sample

# The first test pays for the server's start, which takes a minute on a busy machine.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
LONG = 60_000  # tokens: minutes of decoding


def torch_log_probs(model: torch.nn.Module, sample: Sample, temperature: float) -> list[float]:
    """What the model itself gives each trained token of the sample, in order."""
    ids = torch.tensor([list(sample.input_ids)])
    with torch.no_grad():
        table = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    picked = table.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
    return [value for value, mask in zip(picked, sample.completion_mask[1:], strict=True) if mask]


def trained(sample: Sample) -> tuple[list[int], list[float]]:
    """The ids and logprobs of the tokens to train."""
    rows = zip(sample.input_ids, sample.old_log_probs, sample.completion_mask, strict=True)
    kept = [(token, log_prob) for token, log_prob, mask in rows if mask]
    return [token for token, _ in kept], [log_prob for _, log_prob in kept]


def running(engine_url: str) -> int:
    """Requests the engine works on or holds in its queue."""
    page = httpx.get(f"{engine_url}/metrics", timeout=30).text
    values = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.MULTILINE)
    assert len(values) == 2, page[:2000]
    return sum(int(float(value)) for value in values)


PROMPTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Names of rivers: "},
    "ids": {"prompt_token_ids": [71, 68, 75, 75, 78]},
    "messages": {"messages": [{"role": "user", "content": "Name a river."}]},
    "warmer": {"prompt": "Names of owls: ", "sampling": {"temperature": 1.7}},
}


def test_leased_samples_carry_the_engines_tokens_and_logprobs_and_torch_agrees(
    vllm_server: VllmServer, service: Callable[..., Service]
) -> None:
    client = service(vllm_server.url).client
    client.submit([{"prompt_id": name, **prompt} for name, prompt in PROMPTS.items()], final=True)
    lease = client.lease(max_groups=8, min_groups=len(PROMPTS), wait_s=60)
    client.ack(lease)
    assert {group.prompt_id for group in lease.groups} == set(PROMPTS)

    tokenizer = AutoTokenizer.from_pretrained(vllm_server.model)
    prompt_ids = {
        "text": tokenizer.encode(PROMPTS["text"]["prompt"]),
        "ids": PROMPTS["ids"]["prompt_token_ids"],
        "messages": tokenizer.apply_chat_template(
            PROMPTS["messages"]["messages"], add_generation_prompt=True, return_dict=False
        ),
        "warmer": tokenizer.encode(PROMPTS["warmer"]["prompt"]),
    }
    model = AutoModelForCausalLM.from_pretrained(vllm_server.model, dtype=torch.float32)
    for group in lease.groups:
        assert len(group.samples) == 4
        temperature = PROMPTS[group.prompt_id].get("sampling", {}).get("temperature", 1.0)
        for sample in group.samples:
            ids, log_probs = trained(sample)
            assert list(sample.input_ids) == [*prompt_ids[group.prompt_id], *ids]
            assert len(ids) == 32
            assert log_probs == pytest.approx(torch_log_probs(model, sample, temperature), abs=TOLERANCE, rel=0)
            assert sample.reward == pytest.approx(sum(ids) % 97 / 97)


def test_a_bump_aborts_what_became_stale_at_the_engine_and_leaves_the_fresh_running(
    vllm_server: VllmServer, service: Callable[..., Service]
) -> None:
    client = service(vllm_server.url, groups={"num_generations": 4, "max_staleness": 1}).client
    wait_until(lambda: running(vllm_server.url) == 0, 30, lambda: running(vllm_server.url))
    endless = {"prompt": "On and on: ", "sampling": {"max_tokens": LONG}}

    (old,) = client.submit([{"prompt_id": "old", **endless}])
    wait_until(lambda: running(vllm_server.url) == 4, 30, lambda: running(vllm_server.url))
    client.post_version(1)
    (fresh,) = client.submit([{"prompt_id": "fresh", **endless}])
    wait_until(lambda: running(vllm_server.url) == 8, 30, lambda: running(vllm_server.url))

    bump = client.post_version(2)
    assert (bump.stale_groups, bump.aborted_rollouts) == (1, 4)
    assert client.group(old.group_id).state == "stale"
    wait_until(lambda: running(vllm_server.url) == 4, 10, lambda: running(vllm_server.url))
    assert client.group(fresh.group_id).state == "generating"

    bump = client.post_version(3)
    assert (bump.stale_groups, bump.aborted_rollouts) == (1, 4)
    wait_until(lambda: running(vllm_server.url) == 0, 10, lambda: running(vllm_server.url))
    status = client.status()
    assert status.groups["stale"] == 2
    assert status.slots.used == 0
