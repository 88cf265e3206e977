"""TRL's `AsyncGRPOTrainer` on the scored groups of a rollout-service.

    from trainer_client.trl import MarkOnSave, ReloadWeightTransfer, RemoteRolloutWorker

    worker = RemoteRolloutWorker("http://127.0.0.1:8080")
    trainer = AsyncGRPOTrainer(
        model, args=args, train_dataset=dataset,  # TRL wants one; the prompts that count are the service's
        rollout_worker=worker,
        weight_transfer=ReloadWeightTransfer(["http://127.0.0.1:8000"], "weights", worker=worker),
        callbacks=[MarkOnSave(worker)],
    )

Written against TRL 1.16. Needs `transformers`, and torch for the weights; TRL itself is never imported.
"""

from trainer_client.trl.callbacks import MarkOnSave
from trainer_client.trl.health import Exhausted, NoProgress
from trainer_client.trl.samples import RolloutSample, UnfitSample
from trainer_client.trl.weights import ReloadWeightTransfer, WeightTransferError
from trainer_client.trl.worker import RemoteRolloutWorker

__all__ = [
    "Exhausted",
    "MarkOnSave",
    "NoProgress",
    "ReloadWeightTransfer",
    "RemoteRolloutWorker",
    "RolloutSample",
    "UnfitSample",
    "WeightTransferError",
]
