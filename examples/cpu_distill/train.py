"""On-policy distillation in plain torch over the rollout-service: a student learns from what a teacher finds likely.

    python -m examples.cpu_distill.train MODEL_DIR --service URL --engine URL --weights DIR [--steps 40]

Prints one JSON object a step. A version is posted only after the engine serves its weights.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.cpu_grpo.train import Engine, arguments_of, train
from trainer_client import Lease
from trainer_client.tensors import to_tensors

SAMPLES_PER_STEP = 32


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


def step_of(model: Any, lease: Lease) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of one step, and what to tell of it: the loss itself and how likely the teacher finds the samples."""
    batch = to_tensors(lease.groups, pad_token_id=model.config.pad_token_id)
    loss = distillation_loss(model, batch)
    return loss, {"loss": loss.item(), "likelihood": likelihood(batch), "samples": len(lease.samples)}


def main() -> None:
    given = arguments_of("Distil a teacher into a student on leased samples.", steps=40)
    engine = Engine(given.engine, given.weights)
    train(given.model, given.service, engine, given.steps, step_of=step_of, groups_per_step=SAMPLES_PER_STEP)


if __name__ == "__main__":
    main()
