"""Leased groups as tensors: shapes, dtypes, alignment, padding."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.client_script import group, sample
from trainer_client import Group, Sample

torch = pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")

PAD = 9


def groups(*samples_of: list[dict[str, Any]]) -> list[Group]:
    return [msgspec.convert(group(f"g{i}", samples=rows), Group) for i, rows in enumerate(samples_of)]


def to_tensors(*args: Any, **kwargs: Any) -> dict[str, Any]:
    from trainer_client import tensors

    return tensors.to_tensors(*args, **kwargs)


def test_shapes_and_dtypes_are_as_documented():
    batch = to_tensors(groups([sample(0), sample(1)], [sample(0, completion=7)]), PAD)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((3, 9), torch.int64),
        "attention_mask": ((3, 9), torch.int64),
        "completion_mask": ((3, 9), torch.int64),
        "old_log_probs": ((3, 9), torch.float32),
        "advantages": ((3,), torch.float32),
        "group_index": ((3,), torch.int64),
        "sample_index": ((3,), torch.int64),
    }
    assert batch["group_index"].tolist() == [0, 0, 1]
    assert batch["sample_index"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("side", ["right", "left"])
def test_every_value_stands_at_its_token_whatever_the_lengths_and_the_padding(side):
    made = [[sample(0), sample(1, prompt=1, completion=9)], [sample(2, prompt=4, completion=0)]]
    batch = to_tensors(groups(*made), PAD, padding_side=side)
    rows = [row for rows in made for row in rows]
    longest = 10
    for b, row in enumerate(rows):
        length = len(row["input_ids"])
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        outside = [t for t in range(longest) if not place.start <= t < place.stop]
        for name in ("input_ids", "completion_mask", "old_log_probs"):
            assert batch[name][b, place].tolist() == row[name]
        assert batch["attention_mask"][b, place].tolist() == [1] * length
        assert batch["input_ids"][b, outside].tolist() == [PAD] * len(outside)
        for name in ("attention_mask", "completion_mask", "old_log_probs"):
            assert not batch[name][b, outside].any()
    # The logprob of the token 100 * index + t is -t / 8: it is about its own token, in the unpadded order.
    trained = batch["completion_mask"] == 1
    assert torch.equal(batch["old_log_probs"][trained], -(batch["input_ids"][trained] % 100) / 8)
    assert not batch["old_log_probs"][~trained].any()


def test_a_single_sample_has_no_padding():
    batch = to_tensors(groups([sample(3)]), PAD)
    assert batch["input_ids"].tolist() == [[300, 301, 302, 303, 304]]
    assert batch["attention_mask"].tolist() == [[1] * 5]
    assert batch["advantages"].tolist() == [3.5]


def test_an_unscored_sample_has_advantage_zero_and_keeps_its_tokens():
    batch = to_tensors(groups([sample(0), sample(1, scored=False, reward=None, advantage=0.0)]), PAD)
    assert batch["advantages"].tolist() == [0.5, 0.0]
    assert batch["completion_mask"][1].tolist() == [0, 0, 1, 1, 1]


def test_logits_shifted_as_documented_pair_with_the_logprobs():
    batch = to_tensors(groups([sample(0, prompt=2, completion=3)]), PAD)
    logits = torch.randn(1, 5, 200, generator=torch.Generator().manual_seed(0))
    of_tokens = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    assert of_tokens.shape == batch["old_log_probs"][:, 1:].shape == batch["completion_mask"][:, 1:].shape
    by_hand = logits[0, 1].log_softmax(-1)[2]  # token 2, the first of the completion, from what stands before it
    assert of_tokens[0][batch["completion_mask"][0, 1:] == 1][0] == by_hand


def test_tensors_go_to_the_device_asked_for():
    assert to_tensors(groups([sample(0)]), PAD, device="meta")["input_ids"].device.type == "meta"


@pytest.mark.parametrize(
    "nothing", [[], [Group(group_id="g", prompt_id="p", policy_version=0, staleness=0, samples=[])]]
)
def test_no_samples_are_a_clear_error(nothing):
    with pytest.raises(ValueError, match="no samples to make a batch of"):
        to_tensors(nothing, PAD)


def test_a_sample_of_unequal_arrays_is_named():
    bad = Sample(index=4, policy_version=0, input_ids=[1, 2], completion_mask=[0, 1], old_log_probs=[0.0])
    with pytest.raises(ValueError, match="group g7, sample 4: 1 values of old_log_probs for 2 tokens"):
        to_tensors([Group(group_id="g7", prompt_id="p", policy_version=0, staleness=0, samples=[bad])], PAD)


def test_an_unknown_padding_side_is_refused():
    with pytest.raises(ValueError, match="padding_side"):
        to_tensors(groups([sample(0)]), PAD, padding_side="middle")
