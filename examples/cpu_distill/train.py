"""On-policy distillation in plain torch over the rollout-service: a student learns from what a teacher finds likely.

    python -m examples.cpu_distill.train MODEL_DIR --service URL --engine URL --weights DIR [--steps 40]

Prints one JSON object a step. A version is posted only after the engine serves its weights.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.cpu_grpo.train import Engine
from trainer_client import Lease, RolloutClient
from trainer_client.tensors import to_tensors

SAMPLES_PER_STEP = 32
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)


def distillation_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Reverse KL from student q to teacher p, nats, a scalar: the mean over the trained tokens of the batch.

    The teacher names K tokens; all others are taken together as one more outcome "something else", so that both sides
    are distributions:

        sum over v in K of q(v) (log q(v) - log p(v))  +  q(else) (log q(else) - log p(else))

    Never negative, 0 where q is p on those outcomes, and at most the KL over the whole vocabulary (log sum inequality).
    Reverse KL on the student's own samples: Agarwal et al. 2023, arXiv:2306.13649 (GKD); the outcome "else" as in TRL
    1.16's AsyncDistillationTrainer (`add_tail_bucket`), over all of the teacher's candidates.
    """
    trained = batch["completion_mask"][:, 1:].bool()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    ids = batch["teacher_topk_ids"][:, 1:][trained]
    there = ids >= 0
    teacher = batch["teacher_topk_logprobs"][:, 1:][trained]
    student = logits[trained].log_softmax(-1).gather(-1, ids.clamp_min(0))
    p = with_rest(teacher)
    q = with_rest(student.masked_fill(~there, float("-inf")))
    # What fills up a row is no outcome. Its -inf must not meet a 0: even the gradient of that is not a number.
    outcome = torch.cat([there, there.new_ones(len(there), 1)], dim=-1)
    p, q = p.masked_fill(~outcome, 0.0), q.masked_fill(~outcome, 0.0)
    return ((q.exp() * (q - p)).masked_fill(~outcome, 0.0)).sum(-1).mean()


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """(N, K) logprobs of some outcomes -> (N, K + 1), the last one being that of all others."""
    total = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-6)
    return torch.cat([log_probs, torch.log(-torch.expm1(total))], dim=-1)


def likelihood(batch: dict[str, torch.Tensor]) -> float:
    """Mean logprob the teacher gives the tokens that were sampled."""
    ids, trained = batch["teacher_topk_ids"], batch["completion_mask"].bool()
    sampled = (ids == batch["input_ids"][..., None]) & trained[..., None]
    return batch["teacher_topk_logprobs"][sampled].mean().item()


def report(step: int, lease: Lease, loss: float, sampled: float, engine_version: str, seconds: float) -> None:
    """One line for whoever watches."""
    line = {
        "step": step,
        "loss": loss,
        "likelihood": sampled,
        "staleness": sum(group.staleness for group in lease.groups) / len(lease.groups),
        "samples": len(lease.samples),
        "seconds": seconds,
        "engine_version": engine_version,
    }
    print(json.dumps(line), flush=True)


def train(model_dir: Path, service: str, engine: Engine, steps: int) -> None:
    torch.set_num_threads(1)  # engine and teacher need the other core
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS)
    with RolloutClient(service, consumer="trainer") as client:
        version = client.status().policy_version + 1
        engine.load(model, version)
        client.post_version(version)
        started = time.monotonic()
        leases = client.leases(max_groups=SAMPLES_PER_STEP, min_groups=SAMPLES_PER_STEP, wait_s=30)
        for step, lease in enumerate(leases, start=1):
            batch = to_tensors(lease.groups, pad_token_id=model.config.pad_token_id)
            loss = distillation_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            engine_version = engine.load(model, version + step)
            client.post_version(version + step)
            report(step, lease, loss.item(), likelihood(batch), engine_version, time.monotonic() - started)
            started = time.monotonic()
            if step == steps:
                client.ack(lease)  # leaving the loop gives back what was not acked
                break


def main() -> None:
    parser = argparse.ArgumentParser(description="Distil a teacher into a student on leased samples.")
    parser.add_argument("model", type=Path, help="the student")
    parser.add_argument("--service", required=True, help="the service's address")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--weights", type=Path, required=True, help="folder that this process and the engine both see")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    train(arguments.model, arguments.service, Engine(arguments.engine, arguments.weights), arguments.steps)


if __name__ == "__main__":
    main()
