"""A leased group as TRL's rows: types, versions, names; what is left out and what is refused."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.client_script import group, sample
from trainer_client import Group
from trainer_client.trl import RolloutSample, UnfitSample
from trainer_client.trl.samples import group_number, to_samples


def rows_of(*samples: dict[str, Any], offset: int = 0, **more: Any) -> tuple[list[RolloutSample], int]:
    made = group("g-7", 3, list(samples)) | more
    return to_samples(msgspec.convert(made, Group), version_offset=offset, now=12.5)


def test_a_row_has_trls_types_and_the_whole_length():
    (row, _), skipped = rows_of(sample(0), sample(1))
    assert skipped == 0
    assert (row.input_ids.dtype, row.completion_mask.dtype) == (np.int64, np.int64)
    assert row.old_log_probs.dtype == np.float32
    assert row.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert row.completion_mask.tolist() == [0, 0, 1, 1, 1]
    assert row.old_log_probs.tolist() == [0.0, 0.0, -0.25, -0.375, -0.5]
    assert (row.advantage, row.group_id, row.enqueued_at) == (0.5, 7, 12.5)


def test_numpy_arrays_of_a_binary_lease_are_widened():
    arrays = {
        "input_ids": np.array([5, 6, 7], dtype=np.int32),
        "completion_mask": np.array([0, 1, 1], dtype=np.uint8),
        "old_log_probs": np.array([0, -1, -2], dtype=np.float32),
    }
    made = msgspec.convert(group("g-1"), Group)
    made.samples = [msgspec.structs.replace(made.samples[0], **arrays)]
    (row,), _ = to_samples(made, version_offset=0, now=0.0)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert (row.input_ids.dtype, row.completion_mask.dtype) == (np.int64, np.int64)


def test_versions_are_trls_own():
    (row,), _ = rows_of(sample(policy_version=57), offset=50)
    assert row.model_version == 7


def test_an_unscored_sample_has_no_advantage_and_no_reward():
    unscored = sample(scored=False, reward=None, rewards={"accuracy": None}, advantage=9.0)
    (row,), _ = rows_of(unscored, reward_std=None)
    assert row.advantage == 0.0
    assert all(math.isnan(row.metrics[name]) for name in ("reward", "reward_std", "rewards/accuracy"))


def test_metrics_are_floats_under_trls_names_and_what_is_no_number_is_left_out():
    (row,), _ = rows_of(sample(reward=1, rewards={"a": 1, "b": 0.5}, metrics={"turns": 2, "ok": True, "why": "x"}))
    assert row.metrics == {
        "reward": 1.0, "reward_std": 0.5, "rewards/a": 1.0, "rewards/b": 0.5, "sample_metrics/turns": 2.0,
    }  # fmt: skip
    assert all(type(value) is float for value in row.metrics.values())


@pytest.mark.parametrize(
    ("said", "prompt", "completion"),
    [
        ("hi", [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "hi"}]),
        (None, [{"role": "user", "content": ""}], [{"role": "assistant", "content": ""}]),
        ([{"role": "tool", "content": "x"}], [{"role": "tool", "content": "x"}], [{"role": "tool", "content": "x"}]),
    ],
)
def test_prompt_and_completion_are_lists_of_messages(said: Any, prompt: Any, completion: Any):
    (row,), _ = rows_of(sample(prompt=2) | {"prompt": said, "completion": said})
    assert (row.prompt, row.completion) == (prompt, completion)


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 0, 0]], ids=["nothing", "only a token nothing can predict"])
def test_a_sample_without_a_token_to_train_is_left_out_and_counted(mask: list[int]):
    empty = sample(1, prompt=3, completion=0, completion_mask=mask)
    rows, skipped = rows_of(sample(0), empty)
    assert len(rows) == 1
    assert skipped == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"completion_mask": [0, 1]},
        {"old_log_probs": [0.0]},
        {"old_log_probs": [0.0, 0.0, math.nan, 0.0, 0.0]},
        {"old_log_probs": [0.0, 0.0, -math.inf, 0.0, 0.0]},
        {"advantage": math.inf},
    ],
)
def test_a_sample_that_would_break_training_is_refused_and_named(wrong: dict[str, Any]):
    with pytest.raises(UnfitSample, match=r"group g-7, sample 1"):
        rows_of(sample(0), sample(1, **wrong))


def test_group_ids_become_numbers_that_stay_the_same_and_differ():
    ids = ["g-0", "g-42", "42", "g42", "g--42", "g-x", "replica-1/g-42", "g-" + "9" * 40]
    numbers = [group_number(name) for name in ids]
    assert numbers[:2] == [0, 42]
    assert len(set(numbers)) == len(ids)
    assert all(number < 0 for number in numbers[2:])
    assert numbers == [group_number(name) for name in ids]
    assert all(-(2**63) <= number < 2**63 for number in numbers)


def test_the_rows_are_field_for_field_those_of_the_installed_trl():
    """Read in TRL's file: to import that takes fifteen seconds of processor time."""
    trl = importlib.util.find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed (it is in the dev lock)")
    file = Path(trl.origin).parent / "experimental" / "async_grpo" / "async_rollout_worker.py"
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    (theirs,) = [node for node in classes if node.name == "RolloutSample"]
    assert not theirs.bases, "it has the fields of those, too"
    fields = [ast.unparse(node.target) for node in theirs.body if isinstance(node, ast.AnnAssign)]
    assert fields == [field.name for field in dataclasses.fields(RolloutSample)]
