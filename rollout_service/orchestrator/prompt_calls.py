"""Taking prompts: all or nothing, each identity once, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

from rollout_service.core.group import Group, group_id
from rollout_service.core.model import Prompt, prompt_size
from rollout_service.core.records import NewGroup
from rollout_service.core.scheduler import Policy, Scheduler
from rollout_service.errors import Conflict, InvalidField, QueueFull, StoreUnavailable
from rollout_service.orchestrator.calls import Calls
from rollout_service.orchestrator.parts import Clock
from rollout_service.orchestrator.views import Submission
from rollout_service.orchestrator.workshop import Rules
from rollout_service.orchestrator.writer import Writer
from rollout_service.store.protocol import Store


class PromptCalls(Calls):
    def __init__(self, writer: Writer, store: Store, rules: Rules, clock: Clock) -> None:
        super().__init__(writer, store, rules, clock)
        self._submitting = asyncio.Lock()

    @property
    def max_pending_groups(self) -> int:
        return self._rules.policy.max_pending_groups

    @property
    def _each_alone(self) -> bool:
        return self._rules.scoring.distillation

    def fitting(self, prompts: Sequence[Prompt], room: int) -> int:
        """How many of the first of `prompts` make `room` groups at most; one, where even that makes more."""
        return fitting(prompts, room, alone=self._each_alone)

    async def take(
        self,
        submissions: Sequence[Submission],
        *,
        final: bool = False,
        read_from: int = 0,
        read_position: int | None = None,
    ) -> list[tuple[str, str]]:
        """As `submit`, for the prompts file too: it was read from `read_from` to `read_position`, which is committed
        together with the groups. Raises StoreUnavailable where the store was reloaded at another position meanwhile.
        """
        writer = self._writer
        if self._each_alone:
            submissions = [alone for submission in submissions for alone in each_alone(submission)]
        async with self._submitting:
            writer.require_open()
            known = await self._known({(s.prompt.prompt_id, s.prompt.epoch) for s in submissions})
            writer.require_open()
            if read_position is not None and read_from != writer.run.read_position:
                raise StoreUnavailable("the store was reloaded while rows were read; they are read again")
            core = writer.core
            seqs, new = number(submissions, known, core, now=self._clock())
            held = writer.prompts
            check_room(new, self._rules.policy, pending=core.pending, prompts=len(held), prompt_bytes=held.size)
            if new:
                writer.submit(new)
            if final and not writer.core.final:
                writer.core.finish_input()
            if read_position is not None:
                writer.read_to(read_position)
            writer.turn()
            await writer.settled()
        return [(group_id(seq), s.prompt.prompt_id) for seq, s in zip(seqs, submissions, strict=True)]

    async def _known(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], tuple[int, bytes]]:
        here = self._writer.prompts.keys
        missing = [key for key in keys if key not in here]
        stored = await self._store.find_prompts(missing) if missing else {}
        return {key: (found.seq, found.digest) for key, found in stored.items()} | {
            key: here[key] for key in keys if key in here
        }


def fitting(prompts: Sequence[Prompt], room: int, *, alone: bool) -> int:
    """How many of the first of `prompts` make `room` groups at most; one, where even that makes more.

    `alone`: each rollout is a group of its own.
    """
    for count, prompt in enumerate(prompts):
        room -= prompt.num_generations if alone else 1
        if room < 0:
            return max(1, count)
    return len(prompts)


def number(
    submissions: Sequence[Submission],
    known: Mapping[tuple[str, int], tuple[int, bytes]],
    core: Scheduler,
    *,
    now: float,
) -> tuple[list[int], dict[int, NewGroup]]:
    """The seq of every submission, and those that are new, numbered from the core's `last_seq` + 1 on.

    `known`: identity -> (seq, digest) of those submitted before. Raises Conflict for a known identity with other
    content, and for a new one after the last.
    """
    seen = dict(known)
    seqs: list[int] = []
    new: dict[int, NewGroup] = {}
    for submission in submissions:
        prompt = submission.prompt
        key = (prompt.prompt_id, prompt.epoch)
        if key not in seen:
            if core.final:
                raise Conflict(
                    f"prompt {prompt.prompt_id!r} came after the last one: the input was declared final",
                    prompt_id=prompt.prompt_id,
                )
            seq = core.last_seq + len(new) + 1
            seen[key] = (seq, submission.digest)
            new[seq] = NewGroup(group=_new_group(seq, prompt, now), prompt=prompt, digest=submission.digest)
        seq, digest = seen[key]
        if digest != submission.digest:
            raise Conflict(
                f"prompt {prompt.prompt_id!r} of epoch {prompt.epoch} is {group_id(seq)} with other content",
                prompt_id=prompt.prompt_id,
                group_id=group_id(seq),
            )
        seqs.append(seq)
    return seqs, new


def check_room(new: Mapping[int, NewGroup], policy: Policy, *, pending: int, prompts: int, prompt_bytes: int) -> None:
    """Pending groups are bounded in number and, with all outstanding prompts, in bytes (design 4.7).

    `pending` groups are pending, `prompts` are outstanding and take `prompt_bytes`. Raises InvalidField, QueueFull.
    """
    if len(new) > policy.max_pending_groups:
        raise InvalidField(
            f"prompts: {len(new)} new ones in a call, but groups.max_pending_groups is {policy.max_pending_groups}"
        )
    if pending + len(new) > policy.max_pending_groups:
        raise QueueFull(
            f"{pending} groups are pending and {len(new)} more would exceed groups.max_pending_groups "
            f"= {policy.max_pending_groups}; send them again later",
            pending=pending,
        )
    size = sum(prompt_size(entry.prompt) for entry in new.values())
    if new and prompts and prompt_bytes + size > policy.max_ready_bytes:
        raise QueueFull(
            f"prompts of outstanding groups take {prompt_bytes} bytes and {size} more would exceed "
            f"groups.max_ready_bytes = {policy.max_ready_bytes}; send them again later"
        )


def each_alone(submission: Submission) -> Iterator[Submission]:
    """Distillation (design 3.1.10): each rollout of a prompt is a group of its own, so that it alone is outdated,
    fails or is cancelled. The first keeps the prompt's id, rollout k is `{prompt_id}#{k}`."""
    prompt = submission.prompt
    for row in range(prompt.num_generations):
        prompt_id = f"{prompt.prompt_id}#{row}" if row else prompt.prompt_id
        yield Submission(
            prompt=replace(prompt, prompt_id=prompt_id, num_generations=1),
            # Its own digest: a prompt that really is called `p#1` is not taken for a rollout of `p`, but refused.
            digest=sha256(submission.digest + str(row).encode()).digest() if row else submission.digest,
        )


def _new_group(seq: int, prompt: Prompt, now: float) -> Group:
    return Group(
        seq=seq,
        prompt_id=prompt.prompt_id,
        epoch=prompt.epoch,
        num_generations=prompt.num_generations,
        waiting=tuple(range(prompt.num_generations)),
        submitted_at=now,
        changed_at=now,
    )
