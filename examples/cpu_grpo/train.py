"""GRPO in plain torch over the rollout-service: lease groups, take a step, load the weights, post the version.

    python -m examples.cpu_grpo.train MODEL_DIR --service URL --engine URL --weights DIR [--steps 40]

Prints one JSON object a step. A version is posted only after the engine serves its weights, so it is a lower bound for
every token generated from then on; `old_log_probs` are the engine's own, so mixed versions need no correction here.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from trainer_client import Lease, RolloutClient
from trainer_client.tensors import to_tensors

GROUPS_PER_STEP = 8
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
CLIP = 0.2
ENGINE_TIMEOUT_S = 120.0


def grpo_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The clipped policy-gradient loss, a scalar: mean over the trained tokens of the batch (to_tensors' shapes)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    mask = batch["completion_mask"][:, 1:]
    ratio = ((log_probs - batch["old_log_probs"][:, 1:]) * mask).exp()
    advantages = batch["advantages"][:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / mask.sum()


class Engine:
    """The weights of one running vLLM server (dev mode)."""

    def __init__(self, url: str, folder: Path) -> None:
        self.http = httpx.Client(base_url=url, timeout=ENGINE_TIMEOUT_S)
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def call(self, path: str, body: dict[str, object] | None = None) -> None:
        self.http.post(path, json=body).raise_for_status()

    def load(self, model: torch.nn.Module, version: int) -> str:
        """Serve `model` as `version`; returns the version the engine then reports.

        Requests in flight are frozen meanwhile and go on with the new weights. The pause also empties the prefix
        cache, which holds states of the old weights.
        """
        # Renamed only when complete: an engine that reads half a file dies.
        partial = self.folder / "partial"
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, partial)
        os.replace(partial, self.folder / "model.safetensors")
        self.call("/pause?mode=keep")
        try:
            self.call(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder.resolve())}}
            )
            self.call("/update_weight_version", {"new_version": str(version)})
        finally:
            self.call("/resume")
        return str(self.http.get("/weight_info").raise_for_status().json()["weight_version"])


def step_of(model: Any, lease: Lease) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of one step, and what to tell of it: the mean reward."""
    rewards = [group.reward_mean for group in lease.groups if group.reward_mean is not None]
    loss = grpo_loss(model, to_tensors(lease.groups, pad_token_id=model.config.pad_token_id))
    return loss, {"reward": sum(rewards) / len(rewards)}


def train(
    model_dir: Path,
    service: str,
    engine: Engine,
    steps: int,
    *,
    step_of: Callable[[Any, Lease], tuple[torch.Tensor, dict[str, float]]] = step_of,
    groups_per_step: int = GROUPS_PER_STEP,
    learning_rate: float = LEARNING_RATE,
) -> None:
    """Lease, step, load, post, `steps` times; prints one JSON object a step, with the facts `step_of` tells."""
    torch.set_num_threads(1)  # the engine needs the other core
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=BETAS)
    with RolloutClient(service, consumer="trainer") as client:
        version = client.status().policy_version + 1
        engine.load(model, version)
        client.post_version(version)
        started = time.monotonic()
        leases = client.leases(max_groups=groups_per_step, min_groups=groups_per_step, wait_s=30)
        for step, lease in enumerate(leases, start=1):
            loss, facts = step_of(model, lease)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            engine_version = engine.load(model, version + step)
            client.post_version(version + step)
            line = {
                "step": step,
                "staleness": sum(group.staleness for group in lease.groups) / len(lease.groups),
                "groups": len(lease.groups),
                "seconds": time.monotonic() - started,
                "engine_version": engine_version,
            }
            print(json.dumps(line | facts), flush=True)
            started = time.monotonic()
            if step == steps:
                client.ack(lease)  # leaving the loop gives back what was not acked
                break


def arguments_of(description: str, steps: int) -> argparse.Namespace:
    """The command line of a trainer: `model`, `service`, `engine`, `weights`, `steps`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path)
    parser.add_argument("--service", required=True, help="the service's address")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--weights", type=Path, required=True, help="folder that this process and the engine both see")
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args()


def main() -> None:
    given = arguments_of("Train a policy on leased groups.", steps=40)
    train(given.model, given.service, Engine(given.engine, given.weights), given.steps)


if __name__ == "__main__":
    main()
