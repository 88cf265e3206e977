"""GRPO over conversations with a tool: the loss and the weight update of `examples/cpu_grpo`, and nothing new.

    python -m examples.cpu_tools.train MODEL_DIR --service URL --engine URL --weights DIR [--steps 30]

Prints one JSON object a step. Nothing in the loss knows of tools: the mask of a sample has 1 on what the policy said in
any turn, and 0 on the prompt and on what the tool answered.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.cpu_grpo.train import BETAS, GROUPS_PER_STEP, Engine, grpo_loss
from trainer_client import Lease, RolloutClient
from trainer_client.tensors import to_tensors

LEARNING_RATE = 4e-4  # at 1e-3 it learns to call, and unlearns to copy the numbers


def report(step: int, lease: Lease, engine_version: str, seconds: float) -> None:
    """One line for whoever watches."""
    rewards = [group.reward_mean for group in lease.groups if group.reward_mean is not None]
    rollouts = {sample.rollout_id: sample.metrics for sample in lease.samples}
    line = {
        "step": step,
        "reward": sum(rewards) / len(rewards),
        "called": sum(metrics["tool_calls"] > 0 for metrics in rollouts.values()) / len(rollouts),
        "samples": len(lease.samples) / len(rollouts),
        "staleness": sum(group.staleness for group in lease.groups) / len(lease.groups),
        "groups": len(lease.groups),
        "seconds": seconds,
        "engine_version": engine_version,
    }
    print(json.dumps(line), flush=True)


def train(model_dir: Path, service: str, engine: Engine, steps: int) -> None:
    torch.set_num_threads(1)  # the engine needs the other core
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    with RolloutClient(service, consumer="trainer") as client:
        version = client.status().policy_version + 1
        engine.load(model, version)
        client.post_version(version)
        started = time.monotonic()
        leases = client.leases(max_groups=GROUPS_PER_STEP, min_groups=GROUPS_PER_STEP, wait_s=30)
        for step, lease in enumerate(leases, start=1):
            loss = grpo_loss(model, to_tensors(lease.groups, pad_token_id=model.config.pad_token_id))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            engine_version = engine.load(model, version + step)
            client.post_version(version + step)
            report(step, lease, engine_version, time.monotonic() - started)
            started = time.monotonic()
            if step == steps:
                client.ack(lease)  # leaving the loop gives back what was not acked
                break


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy that calls tools on leased groups.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--service", required=True, help="the service's address")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--weights", type=Path, required=True, help="folder that this process and the engine both see")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    train(arguments.model, arguments.service, Engine(arguments.engine, arguments.weights), arguments.steps)


if __name__ == "__main__":
    main()
