"""GRPO over conversations with a tool: the loss and the weight update of `examples/cpu_grpo`, and nothing new.

    python -m examples.cpu_tools.train MODEL_DIR --service URL --engine URL --weights DIR [--steps 30]

Prints one JSON object a step. Nothing in the loss knows of tools: the mask of a sample has 1 on what the policy said in
any turn, and 0 on the prompt and on what the tool answered.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.cpu_grpo.train import Engine, arguments_of, train
from examples.cpu_grpo.train import step_of as grpo_step
from trainer_client import Lease

LEARNING_RATE = 4e-4  # at 1e-3 it learns to call, and unlearns to copy the numbers


def step_of(model: Any, lease: Lease) -> tuple[torch.Tensor, dict[str, float]]:
    """As cpu_grpo's, with the share of rollouts that called the tool and the samples a rollout made."""
    loss, facts = grpo_step(model, lease)
    rollouts = {sample.rollout_id: sample.metrics for sample in lease.samples}
    called = sum(metrics["tool_calls"] > 0 for metrics in rollouts.values())
    return loss, {**facts, "called": called / len(rollouts), "samples": len(lease.samples) / len(rollouts)}


def main() -> None:
    given = arguments_of("Train a policy that calls tools on leased groups.", steps=30)
    engine = Engine(given.engine, given.weights)
    train(given.model, given.service, engine, given.steps, step_of=step_of, learning_rate=LEARNING_RATE)


if __name__ == "__main__":
    main()
