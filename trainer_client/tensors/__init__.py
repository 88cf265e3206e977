"""Leased groups as what a torch trainer eats. Only what is below this package imports torch.

Many ranks, each doing its part of every step, in micro-batches of at most 16,384 tokens (`torchrun train.py`):

    import torch.distributed as dist
    from trainer_client import RolloutClient
    from trainer_client.tensors import RolloutDataset, micro_batches, pack, trained_tokens

    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    client = RolloutClient("http://127.0.0.1:8080")
    steps = RolloutDataset(client, groups_per_step=32, whole_step=True)
    first = client.version().version + 1
    for version, groups in enumerate(steps, first):       # asking for the next step acks the one before
        denominator = trained_tokens(groups)              # of the whole step, the same number on every rank
        for micro in micro_batches(groups, 16_384, world=world)[rank]:
            batch = pack(micro, device="cuda")
            logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
            log_probs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
            mask = batch["completion_mask"][:, 1:]
            ratio = ((log_probs - batch["old_log_probs"][:, 1:]) * mask).exp()
            loss = -(ratio * batch["token_advantages"][:, 1:] * mask).sum() / denominator
            (loss * world).backward()                     # data parallelism averages gradients over the ranks
        optimizer.step(), optimizer.zero_grad()
        if rank == 0:                                     # once every engine has the new weights
            client.post_version(version)

(With fewer samples in a step than micro-batches one can be empty: `micro_batches` says when.) Without ranks:
`for groups in RolloutDataset(url, groups_per_step=8): train(to_tensors(groups, pad_token_id=0))`.
"""

from trainer_client.tensors.balance import micro_batches, shard
from trainer_client.tensors.dataset import RolloutDataset
from trainer_client.tensors.packed import PackedBatch, pack
from trainer_client.tensors.padded import to_tensors
from trainer_client.tensors.rows import trained_tokens

__all__ = ["PackedBatch", "RolloutDataset", "micro_batches", "pack", "shard", "to_tensors", "trained_tokens"]
