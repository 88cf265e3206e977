"""Samples packed without padding: layout, boundaries, and that a causal model says the same packed and padded."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client_script import group, sample
from trainer_client import Group, Sample

torch = pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")

from trainer_client.tensors import pack, to_tensors, trained_tokens  # noqa: E402  (imports torch)

VOCABULARY, WIDTH, PAD = 64, 16, 0
lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7)), min_size=1, max_size=6)


def groups(*samples_of: list[dict[str, Any]]) -> list[Group]:
    return [msgspec.convert(group(f"g{i}", samples=rows), Group) for i, rows in enumerate(samples_of)]


def drawn(rng: np.random.Generator, *sizes: tuple[int, int]) -> list[Group]:
    """One group; a sample of random tokens and logprobs for each (prompt, completion)."""
    rows = []
    for index, (prompt, completion) in enumerate(sizes):
        row = sample(index, prompt=prompt, completion=completion, advantage=float(rng.normal()))
        row["input_ids"] = rng.integers(1, VOCABULARY, prompt + completion).tolist()
        row["old_log_probs"] = [0.0] * prompt + rng.uniform(-3, 0, completion).astype(np.float32).tolist()
        rows.append(row)
    return groups(rows)


class TinyModel(torch.nn.Module):
    """One causal attention layer. Where it gets `cu_seqlens` each segment attends to itself only."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(64, WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Any, position_ids: Any, cu_seqlens: Any = None) -> Any:
        x = self.tokens(input_ids) + self.positions(position_ids)
        attend = torch.nn.functional.scaled_dot_product_attention
        q, k, v = self.qkv(x).chunk(3, -1)
        if cu_seqlens is None:
            y = attend(q, k, v, is_causal=True)
        else:
            bounds = cu_seqlens.tolist()
            parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            y = torch.cat([attend(q[:, part], k[:, part], v[:, part], is_causal=True) for part in parts], 1)
        return self.head(x + y)


def of_tokens(logits: Any, input_ids: Any) -> Any:
    """As the docstrings say: the logprob of every token but a row's first."""
    return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def test_shapes_and_dtypes_are_as_documented():
    batch = pack(groups([sample(0), sample(1)], [sample(0, completion=7)]))
    assert batch.pop("max_seqlen") == 9
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "input_ids": ((1, 19), torch.int64),
        "position_ids": ((1, 19), torch.int64),
        "labels": ((1, 19), torch.int64),
        "cu_seqlens": ((4,), torch.int32),
        "completion_mask": ((1, 19), torch.int64),
        "old_log_probs": ((1, 19), torch.float32),
        "token_advantages": ((1, 19), torch.float32),
        "advantages": ((3,), torch.float32),
        "group_index": ((3,), torch.int64),
        "sample_index": ((3,), torch.int64),
    }
    assert batch["group_index"].tolist() == [0, 0, 1]
    assert batch["sample_index"].tolist() == [0, 1, 0]
    assert batch["cu_seqlens"].tolist() == [0, 5, 10, 19]


def test_every_value_stands_at_its_token_and_positions_restart():
    batch = pack(groups([sample(0, prompt=1, completion=2), sample(2, prompt=2, completion=1)]))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 200, 201, 202]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch["completion_mask"].tolist() == [[0, 1, 1, 0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 1, 2, -100, -100, 202]]
    assert batch["old_log_probs"].tolist() == [[0, -1 / 8, -2 / 8, 0, 0, -2 / 8]]
    assert batch["token_advantages"].tolist() == [[0.5, 0.5, 0.5, 2.5, 2.5, 2.5]]
    assert batch["advantages"].tolist() == [0.5, 2.5]


def test_samples_given_alone_are_packed_the_same_but_have_no_group():
    made = groups([sample(0)], [sample(1), sample(2)])
    alone, together = pack([s for g in made for s in g.samples]), pack(made)
    assert alone.pop("group_index").tolist() == [-1, -1, -1]
    together.pop("group_index")
    assert all(np.array_equal(alone[name], together[name]) for name in together)


def test_arrays_of_a_binary_lease_are_packed_as_lists_are():
    rows = [sample(0), sample(1, completion=0)]
    listed = groups(rows)
    arrays = groups(rows)
    for one in arrays[0].samples:
        one.input_ids = np.array(one.input_ids, np.int32)
        one.completion_mask = np.array(one.completion_mask, np.uint8)
        one.old_log_probs = np.array(one.old_log_probs, np.float32)
    assert all(np.array_equal(pack(arrays)[name], value) for name, value in pack(listed).items())
    assert trained_tokens(arrays) == trained_tokens(listed) == 3


def test_one_sample_is_its_own_batch():
    batch = pack(groups([sample(3)]))
    assert batch["cu_seqlens"].tolist() == [0, 5]
    assert batch["max_seqlen"] == 5


def test_a_completion_of_no_tokens_has_nothing_to_train():
    batch = pack(groups([sample(0, completion=0), sample(1)]))
    assert batch["labels"].tolist() == [[-100, -100, -100, -100, 102, 103, 104]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 7]


def test_a_sample_of_32k_tokens_is_packed_beside_short_ones():
    batch = pack(groups([sample(0), sample(1, completion=32_768 - 2), sample(2)]))
    assert batch["max_seqlen"] == 32_768
    assert batch["cu_seqlens"].tolist() == [0, 5, 32_773, 32_778]
    assert torch.equal(batch["position_ids"][0, 5:32_773], torch.arange(32_768))


def test_a_sample_that_begins_with_a_trained_token_does_not_train_it():
    """Else the logits of the sample before would be trained to predict it."""
    made = groups([sample(0), sample(1, prompt=0, completion=3)])
    batch = pack(made)
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 1, 1]]
    assert batch["labels"][0, 5] == -100
    assert batch["completion_mask"].sum() == trained_tokens(made) == 5


def test_an_unscored_sample_has_advantage_zero_and_keeps_its_tokens():
    batch = pack(groups([sample(0), sample(1, scored=False, reward=None, advantage=0.7)]))
    assert batch["advantages"].tolist() == [0.5, 0.0]
    assert batch["token_advantages"][0, 5:].tolist() == [0.0] * 5
    assert batch["completion_mask"][0, 5:].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "nothing", [[], [Group(group_id="g", prompt_id="p", policy_version=0, staleness=0, samples=[])]]
)
def test_no_samples_are_a_clear_error(nothing):
    with pytest.raises(ValueError, match="no samples to make a batch of"):
        pack(nothing)


def test_a_sample_of_unequal_arrays_is_named():
    bad = Sample(
        index=4, rollout_id="g7.1.4", policy_version=0, input_ids=[1, 2], completion_mask=[1], old_log_probs=[0.0, 0.0]
    )
    with pytest.raises(ValueError, match=r"rollout g7\.1\.4, sample 4: 1 values of completion_mask for 2 tokens"):
        pack([bad])


def test_tensors_go_to_the_device_asked_for():
    assert pack(groups([sample(0)]), device="meta")["cu_seqlens"].device.type == "meta"


@given(lengths, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_causal_model_gives_the_same_logprobs_packed_and_padded(sizes, seed):
    torch.manual_seed(seed)
    model, made = TinyModel().double(), drawn(np.random.default_rng(seed), *sizes)
    padded, packed = to_tensors(made, PAD), pack(made)
    positions = torch.arange(padded["input_ids"].shape[1]).expand_as(padded["input_ids"])
    with torch.no_grad():
        from_padded = of_tokens(model(padded["input_ids"], positions), padded["input_ids"])
        logits = model(packed["input_ids"], packed["position_ids"], packed["cu_seqlens"])
        from_packed = of_tokens(logits, packed["input_ids"])
    padded_mask, mask = padded["completion_mask"][:, 1:] == 1, packed["completion_mask"][:, 1:] == 1
    # Both in the order of the samples, and of the tokens within each.
    assert torch.allclose(from_padded[padded_mask], from_packed[mask], atol=1e-9)
    assert torch.equal(padded["old_log_probs"][:, 1:][padded_mask], packed["old_log_probs"][:, 1:][mask])
    assert mask.sum() == trained_tokens(made)
    # The labels say the same as the mask, shifted as Hugging Face's loss shifts them.
    by_labels = torch.nn.functional.cross_entropy(logits[0, :-1], packed["labels"][0, 1:], reduction="sum")
    assert torch.allclose(-from_packed[mask].sum(), by_labels)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_model_finds_the_samples_by_their_positions(attention):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (in the dev lock)")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    made = drawn(np.random.default_rng(0), (3, 5), (1, 9), (4, 0), (2, 2))
    padded, packed = to_tensors(made, PAD), pack(made)
    with torch.no_grad():
        logits = model(padded["input_ids"], attention_mask=padded["attention_mask"]).logits
        from_padded = of_tokens(logits, padded["input_ids"])[padded["completion_mask"][:, 1:] == 1]
        answer = model(
            packed["input_ids"], position_ids=packed["position_ids"], labels=packed["labels"], use_cache=False
        )
        from_packed = of_tokens(answer.logits, packed["input_ids"])[packed["completion_mask"][:, 1:] == 1]
    assert torch.allclose(from_padded, from_packed, atol=1e-5)
    assert torch.allclose(answer.loss, -from_packed.mean(), atol=1e-5)
