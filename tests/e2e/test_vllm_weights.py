"""Weights that the service has a real vLLM server load: what is leased afterwards was made with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from examples.engine.make_tiny_model import make_tiny_model
from examples.engine.server import VllmServer
from tests.e2e.conftest import Service
from trainer_client import Denied, Sample

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
RANK = 8
ALPHA = 16


@pytest.fixture(scope="module")
def lora_server(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """A warm server that also takes adapters at run time."""
    folder = tmp_path_factory.mktemp("vllm-lora")
    model = make_tiny_model(folder / "model")
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK)]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with VllmServer(engine_python, model, folder / "engine.log", flags=flags, env=env) as server:
        server.ready()
        yield server


def log_probs(weights: dict[str, torch.Tensor], model_dir: Path, sample: Sample) -> list[float]:
    """What a model with `weights` gives each trained token of the sample, in order."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.load_state_dict(weights)
    ids = torch.tensor([list(sample.input_ids)])
    with torch.no_grad():
        table = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    picked = table.gather(-1, ids[0, 1:, None]).squeeze(-1).tolist()
    return [value for value, mask in zip(picked, sample.completion_mask[1:], strict=True) if mask]


def made_by(weights: dict[str, torch.Tensor], model_dir: Path, sample: Sample) -> bool:
    told = [value for value, mask in zip(sample.old_log_probs, sample.completion_mask, strict=True) if mask]
    return log_probs(weights, model_dir, sample) == pytest.approx(told, abs=TOLERANCE, rel=0)


def one_sample(service: Service, name: str) -> Sample:
    service.client.submit([{"prompt_id": name, "prompt": "Names of rivers: "}])
    lease = service.client.lease(max_groups=1, wait_s=60)
    service.client.ack(lease)
    return lease.samples[0]


def test_the_next_tokens_come_from_the_weights_that_were_posted(
    lora_server: VllmServer, service: Callable[..., Service], tmp_path: Path
) -> None:
    first = load_file(lora_server.model / "model.safetensors")
    other = load_file(make_tiny_model(tmp_path / "other", seed=1) / "model.safetensors")
    run = service(lora_server.url, weights={"allowed_paths": [str(tmp_path), str(lora_server.model)]})
    before = one_sample(run, "before")
    assert made_by(first, lora_server.model, before)
    assert run.client.post_version(1, weights=str(tmp_path / "other")).version == 1
    after = one_sample(run, "after")
    assert after.policy_version == 1
    assert made_by(other, lora_server.model, after)
    assert not made_by(first, lora_server.model, after)
    (engine,) = run.client.engines()
    assert (engine["weight_version"], engine["behind"], engine["healthy"]) == ("1", False, True)
    assert run.client.post_version(2, weights=str(lora_server.model)).version == 2
    assert made_by(first, lora_server.model, one_sample(run, "again"))
    with pytest.raises(Denied, match="allowed_paths"):
        run.client.post_version(3, weights="/etc")


def test_each_version_can_be_an_adapter_that_requests_name(
    lora_server: VllmServer, service: Callable[..., Service], tmp_path: Path
) -> None:
    first = load_file(lora_server.model / "model.safetensors")
    merged = {version: merged_with_adapter(first, tmp_path / f"v{version}", seed=version) for version in (1, 2)}
    run = service(
        lora_server.url,
        model="policy-v{policy_version}",
        weights={"allowed_paths": [str(tmp_path)]},
        dispatch={"wait_for_version": 1},
    )
    for version in (1, 2):
        run.client.post_version(version, lora=(f"policy-v{version}", str(tmp_path / f"v{version}")))
        sample = one_sample(run, f"adapter-{version}")
        assert made_by(merged[version], lora_server.model, sample)
        assert not made_by(first, lora_server.model, sample)


def merged_with_adapter(weights: dict[str, torch.Tensor], folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """Write a random adapter of the query projections to `folder`; the weights with it merged in.

    W + (alpha / r) B A, Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1.
    """
    generator = torch.Generator().manual_seed(seed)
    adapter, merged = {}, dict(weights)
    for name, weight in weights.items():
        if not name.endswith("q_proj.weight"):
            continue
        down = torch.randn(RANK, weight.shape[1], generator=generator)
        up = torch.randn(weight.shape[0], RANK, generator=generator)
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{layer}.lora_A.weight"], adapter[f"{layer}.lora_B.weight"] = down, up
        merged[name] = weight + ALPHA / RANK * up @ down
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged
