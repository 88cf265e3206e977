"""Marks at the service beside the trainer's own checkpoints.

What always holds: where both exist, the mark `step-400` is the point of `checkpoint-400`, so a run that resumes from
the one with `rewind_to` the other trains again exactly what came after it.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("trainer_client")


class Marking(Protocol):
    """What is needed of the worker."""

    samples_ahead: int | None

    def mark(self, name: str) -> None: ...

    def marks(self) -> list[str]: ...

    def forget_mark(self, name: str) -> None: ...


class MarkOnSave(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """Marks `step-N` at the service whenever TRL has saved checkpoint N. Give it to the trainer's `callbacks`.

        worker = RemoteRolloutWorker(url, rewind_to="step-400")
        trainer.train(resume_from_checkpoint="out/checkpoint-400")

    `keep_last`: older marks of this kind are deleted beyond so many, since the service keeps prompts back to the oldest
    mark; None: as many as the trainer keeps checkpoints (`save_total_limit`), all where that is not set either. A mark
    that cannot be made ends training with the client's error: the checkpoint could not be resumed from.
    """

    def __init__(self, worker: Marking, *, keep_last: int | None = None) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is at least 1, not {keep_last}")
        self._worker = worker
        self._keep_last = keep_last

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Tell the worker what TRL fetches beyond what it trains, so that a mark holds what was trained only."""
        budget = getattr(args, "token_budget", None)
        if self._worker.samples_ahead is None and budget is not None and budget <= 0:
            self._worker.samples_ahead = args.per_device_train_batch_size * args.world_size

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Mark this step; the version was posted and the step's groups were acked before."""
        if not state.is_world_process_zero:
            return
        self._worker.mark(f"step-{state.global_step}")
        keep = self._keep_last or args.save_total_limit
        if keep is None:
            return
        ours = [name for name in self._worker.marks() if re.fullmatch(r"step-\d+", name)]
        for name in ours[:-keep]:
            self._worker.forget_mark(name)
