"""TRL's AsyncGRPOTrainer on a rollout-service. What a user of TRL adds is the worker, the weight transfer, the marks.

    python -m examples.trl_async_grpo.train MODEL_DIR --service URL --engine URL --out DIR [--steps 60]

Prints one JSON object for every entry of TRL's log. Prompts, sampling and rewards are the service's (rollout.toml);
TRL's own `max_staleness` and `temperature` must be the same as there.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from examples.trl_async_grpo import shim
from trainer_client.trl import MarkOnSave, ReloadWeightTransfer, RemoteRolloutWorker

GROUPS_PER_STEP, NUM_GENERATIONS = 8, 8


class PrintLog(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """One line of JSON for every entry of the log; what is not a number is null."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        entry = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                 for name, value in (logs or {}).items()}  # fmt: skip
        print(json.dumps({"step": state.global_step} | entry), flush=True)


def make_trainer(
    model: Path, service: str, engine: str, out: Path, *, steps: int, save_steps: int, rewind_to: str | None
) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    worker = RemoteRolloutWorker(service, rewind_to=rewind_to)
    return AsyncGRPOTrainer(
        model=str(model),
        args=AsyncGRPOConfig(
            output_dir=str(out),
            max_steps=steps,
            per_device_train_batch_size=GROUPS_PER_STEP * NUM_GENERATIONS,
            gradient_accumulation_steps=1,
            token_budget=-1,  # this many rows a step, however long they are
            learning_rate=3e-3,
            adam_beta2=0.95,
            max_staleness=2,
            temperature=1.0,
            save_strategy="steps" if save_steps else "no",
            save_steps=save_steps or 1,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,  # the demo runs on two CPU cores
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["the service has the prompts"]}),  # TRL wants one
        rollout_worker=worker,
        weight_transfer=ReloadWeightTransfer([engine], out / "weights", worker=worker),
        callbacks=[MarkOnSave(worker), PrintLog()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy with TRL on the groups of a rollout-service.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--service", required=True, help="the service's address")
    parser.add_argument("--engine", required=True, help="the engine's address")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and weights; the engine must see it too")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=0, help="save and mark every so many steps; 0: never")
    parser.add_argument("--resume", type=int, default=0, help="step of a checkpoint in --out to go on from")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the engine needs the other core
    shim.install()
    trainer = make_trainer(
        arguments.model,
        arguments.service,
        arguments.engine,
        arguments.out,
        steps=arguments.steps,
        save_steps=arguments.save_steps,
        rewind_to=f"step-{arguments.resume}" if arguments.resume else None,
    )
    trainer.remove_callback(PrinterCallback)  # it prints the same, not as JSON
    checkpoint = str(arguments.out / f"checkpoint-{arguments.resume}") if arguments.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
