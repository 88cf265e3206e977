"""The distillation example's loss, against the KL over the whole vocabulary."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the example trains with torch")

from examples.cpu_distill.train import distillation_loss, likelihood  # noqa: E402 - torch may be missing

VOCABULARY = 12
LENGTH = 6


class Model(torch.nn.Module):
    """Logits that depend on nothing but the place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(LENGTH, VOCABULARY, generator=draw))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        logits = self.table[None].expand(len(input_ids), -1, -1)
        return type("Output", (), {"logits": logits})


def batch(teacher: Model, top_k: int, columns: int) -> dict[str, Any]:
    """Two samples the teacher has read; `columns` of which the last are filled up."""
    draw = torch.Generator().manual_seed(5)
    input_ids = torch.randint(VOCABULARY, (2, LENGTH), generator=draw)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]])
    ids = torch.full((2, LENGTH, columns), -1)
    logprobs = torch.full((2, LENGTH, columns), -inf)
    found = teacher.table[:-1].log_softmax(-1).detach()
    for b in range(2):
        for t in range(1, LENGTH):
            if mask[b, t]:
                taken = list(dict.fromkeys([*found[t - 1].topk(top_k).indices.tolist(), int(input_ids[b, t])]))
                ids[b, t, : len(taken)] = torch.tensor(taken)
                logprobs[b, t, : len(taken)] = found[t - 1, taken]
    ones = torch.ones_like(mask)
    tables = {"teacher_topk_ids": ids, "teacher_topk_logprobs": logprobs}
    return {"input_ids": input_ids, "attention_mask": ones, "completion_mask": mask, **tables}


def whole_kl(student: Model, teacher: Model, mask: Any) -> float:
    q, p = student.table[:-1].log_softmax(-1), teacher.table[:-1].log_softmax(-1)
    kl = (q.exp() * (q - p)).sum(-1)
    places = mask[:, 1:].bool()
    return kl[None].expand(2, -1)[places].mean().item()


def test_the_loss_is_nothing_where_student_and_teacher_agree():
    assert distillation_loss(Model(1), batch(Model(1), 3, 5)).item() == pytest.approx(0, abs=1e-5)


def test_with_every_token_named_the_loss_is_the_reverse_kl():
    made = batch(Model(1), VOCABULARY, VOCABULARY + 1)
    expected = whole_kl(Model(2), Model(1), made["completion_mask"])
    assert distillation_loss(Model(2), made).item() == pytest.approx(expected, abs=1e-3)


def test_with_few_tokens_named_it_is_between_nothing_and_the_reverse_kl_and_rises_with_them():
    losses = [distillation_loss(Model(2), batch(Model(1), top_k, 12)).item() for top_k in (1, 3, 6)]
    whole = whole_kl(Model(2), Model(1), batch(Model(1), 1, 2)["completion_mask"])
    assert 0 < losses[0] < losses[1] < losses[2] < whole


def test_gradients_are_numbers_although_rows_are_filled_up_and_descend_to_the_teacher():
    student, made = Model(2), batch(Model(1), 2, 8)
    optimizer = torch.optim.SGD(student.parameters(), lr=1.0)
    first = distillation_loss(student, made).item()
    for _ in range(200):
        loss = distillation_loss(student, made)
        optimizer.zero_grad()
        loss.backward()
        assert torch.isfinite(student.table.grad).all()
        optimizer.step()
    assert loss.item() < first / 20


def test_likelihood_is_what_the_teacher_gives_the_sampled_tokens():
    teacher = Model(1)
    made = batch(teacher, 2, 5)
    found = teacher.table[:-1].log_softmax(-1).detach()
    picked = found[None].expand(2, -1, -1).gather(-1, made["input_ids"][:, 1:, None])[..., 0]
    expected = picked[made["completion_mask"][:, 1:].bool()].mean().item()
    assert likelihood(made) == pytest.approx(expected, abs=1e-6)
