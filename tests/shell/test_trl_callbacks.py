"""Marks at the service beside the trainer's checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_client.trl import MarkOnSave


class Marks:
    """A worker that only keeps marks."""

    def __init__(self, *names: str, samples_ahead: int | None = None) -> None:
        self.names = list(names)
        self.samples_ahead = samples_ahead

    def mark(self, name: str) -> None:
        self.names.append(name)

    def marks(self) -> list[str]:
        return list(self.names)

    def forget_mark(self, name: str) -> None:
        self.names.remove(name)


def save(callback: MarkOnSave, step: int, *, limit: int | None = None, main: bool = True) -> None:
    state = SimpleNamespace(global_step=step, is_world_process_zero=main)
    callback.on_save(SimpleNamespace(save_total_limit=limit), state, SimpleNamespace())


def begin(callback: MarkOnSave, **args: Any) -> None:
    given = {"per_device_train_batch_size": 16, "world_size": 2, "token_budget": -1} | args
    callback.on_train_begin(SimpleNamespace(**given), SimpleNamespace(), SimpleNamespace())


def test_every_save_is_marked_with_its_step():
    worker = Marks()
    save(MarkOnSave(worker), 400)
    assert worker.names == ["step-400"]


def test_only_the_last_marks_are_kept_and_other_marks_are_let_alone():
    worker = Marks("before-the-change", "step-1", "step-2", "step-two")
    save(MarkOnSave(worker, keep_last=2), 3)
    assert worker.names == ["before-the-change", "step-2", "step-two", "step-3"]


def test_without_a_number_as_many_are_kept_as_the_trainer_keeps_checkpoints():
    worker = Marks("step-1", "step-2")
    save(MarkOnSave(worker), 3, limit=1)
    assert worker.names == ["step-3"]
    save(MarkOnSave(worker), 4)
    assert worker.names == ["step-3", "step-4"]


def test_only_the_main_process_marks():
    worker = Marks()
    save(MarkOnSave(worker), 4, main=False)
    assert worker.names == []


def test_no_marks_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        MarkOnSave(Marks(), keep_last=0)


def test_the_worker_learns_how_much_trl_fetches_ahead():
    worker = Marks()
    begin(MarkOnSave(worker))
    assert worker.samples_ahead == 32


@pytest.mark.parametrize("budget", [None, 4096])
def test_with_a_token_budget_that_is_not_known(budget):
    worker = Marks()
    begin(MarkOnSave(worker), token_budget=budget)
    assert worker.samples_ahead is None


def test_what_was_given_to_the_worker_stays():
    worker = Marks(samples_ahead=8)
    begin(MarkOnSave(worker))
    assert worker.samples_ahead == 8
