"""Taking prompts at any replica: all or nothing, each identity once, within bounds of the whole run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rollout_service.core.group import group_id
from rollout_service.core.model import GroupState
from rollout_service.core.records import Batch
from rollout_service.errors import Conflict
from rollout_service.orchestrator.prompt_calls import check_room, each_alone, number
from rollout_service.orchestrator.views import Submission
from rollout_service.orchestrator.workshop import Rules
from rollout_service.replicas import parts
from rollout_service.replicas.calls import Calls
from rollout_service.replicas.parts import Happened
from rollout_service.store.shared import Signal, Transaction


class PromptCalls(Calls, ABC):
    @property
    @abstractmethod
    def _file_is_open(self) -> bool:
        """Whether a prompts file still has rows."""

    async def submit(self, submissions: Sequence[Submission], *, final: bool | None = None) -> list[tuple[str, str]]:
        """All or nothing; (group_id, prompt_id) in the order given. Raises Conflict, QueueFull, InvalidField."""
        self._require_open()
        if final and self._file_is_open:
            raise Conflict("prompts.path is still being read; the input is final when its last epoch has been read")
        if self._rules.scoring.distillation:
            submissions = [alone for submission in submissions for alone in each_alone(submission)]

        async def work(tx: Transaction) -> tuple[list[int], Happened]:
            await tx.hold_run()
            return await take(tx, self._rules, submissions, final=bool(final))

        seqs, happened = await self._store.transact(work)
        happened.tell(self._observer)
        return [(group_id(seq), s.prompt.prompt_id) for seq, s in zip(seqs, submissions, strict=True)]


async def known(tx: Transaction, submissions: Sequence[Submission]) -> Mapping[tuple[str, int], tuple[int, bytes]]:
    """Identity -> (seq, digest) of those that were submitted before."""
    found = await tx.find_prompts({(s.prompt.prompt_id, s.prompt.epoch) for s in submissions})
    return {key: (stored.seq, stored.digest) for key, stored in found.items()}


async def take(
    tx: Transaction,
    rules: Rules,
    submissions: Sequence[Submission],
    *,
    final: bool,
    read_position: int | None = None,
) -> tuple[list[int], Happened]:
    """Submit within a transaction that holds the run's row. `final`: no more will come.

    Raises Conflict, QueueFull, InvalidField.
    """
    core = parts.load(tx, rules.policy)
    seqs, new = number(submissions, await known(tx, submissions), core, now=tx.now)
    counts = tx.whole.counts
    check_room(
        new,
        rules.policy,
        pending=counts[GroupState.PENDING],
        prompts=core.outstanding,
        prompt_bytes=tx.whole.prompt_bytes,
    )
    core.submit(entry.group for entry in new.values())
    happened, _ = await parts.write(tx, core, rules.policy, batch=Batch(new_groups=new))
    run = replace(
        tx.run.run,
        last_seq=core.last_seq,
        final=tx.run.run.final or final,
        read_position=tx.run.run.read_position if read_position is None else read_position,
    )
    if run != tx.run.run:
        await tx.set_run(replace(tx.run, run=run))
    if new:
        tx.signal(Signal.PENDING)
    if final:
        tx.signal(Signal.READY)  # whoever waits may have nothing to wait for
    return seqs, happened
