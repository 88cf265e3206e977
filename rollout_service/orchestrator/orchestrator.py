"""The calls of the service: each one checks, asks the writer, and answers only what is committed.

What always holds: a call that raises has changed nothing; a call that returns has its effect on disk; a call that is
cancelled or whose caller has gone leaves no lease behind that nobody can fetch.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from rollout_service.core.changes import Bumped
from rollout_service.core.group import Group, Lease, LeaseState, group_id, group_seq
from rollout_service.core.model import GroupState, Prompt
from rollout_service.core.records import NewGroup
from rollout_service.core.scheduler import NotHeld, VersionTooLow
from rollout_service.errors import Conflict, InvalidField, NotFound, QueueFull
from rollout_service.orchestrator.intake import Intake, PromptSource
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.views import (
    GroupView,
    LeaseAnswer,
    LeaseRequest,
    LeaseStatus,
    StatusView,
    Submission,
)
from rollout_service.orchestrator.waiters import Outcome, Waiter
from rollout_service.orchestrator.writer import Rules, Writer, prompt_size
from rollout_service.store.protocol import Store


class HungUp(Exception):
    """The caller has gone before there was an answer; nothing is held for it."""


class Orchestrator:
    """The door of this room. All methods belong to the event loop that ran `start`."""

    def __init__(
        self,
        rules: Rules,
        *,
        store: Store,
        runner: RolloutRunner,
        scorer: Scorer,
        engines: Engines,
        observer: Observer,
        source: PromptSource | None = None,
        digest: Callable[[Prompt], bytes] | None = None,
        clock: Clock = time.time,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        if (source is None) is not (digest is None):
            raise ValueError("a prompt source and the digest of its prompts come together")
        self._rules, self._store, self._clock = rules, store, clock
        self._writer = Writer(
            rules,
            store=store,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            clock=clock,
            new_id=new_id,
        )
        self._submitting = asyncio.Lock()
        self._intake = Intake(source, digest, self) if source is not None and digest is not None else None

    async def start(self) -> None:
        """Open the store, take up where it left off, dispatch. Raises ConfigError."""
        await self._writer.start()
        if self._intake is not None:
            await self._intake.start()

    async def stop(self) -> None:
        """End within seconds: dispatch ends, in flight is aborted, waiting callers get `empty`, state is committed."""
        if self._intake is not None:
            await self._intake.stop()
        await self._writer.stop()

    def engines_changed(self) -> None:
        """An engine came, went, or changed its health or capacity."""
        self._writer.touch()

    # policy versions

    @property
    def version(self) -> int:
        return self._writer.core.version

    async def post_version(self, version: int, *, reset: bool = False) -> Bumped:
        """Rule 3.1.7. Raises Conflict where the version is lower than the current one and `reset` is not set."""
        writer = self._writer
        writer.require_open()
        writer.seal_leases()
        try:
            bumped = writer.core.post_version(version, now=self._clock(), reset=reset)
        except VersionTooLow as error:
            raise Conflict(f'{error}; a trainer that went back says "reset": true', version=error.current) from error
        writer.turn()
        await writer.committer.committed()
        return bumped

    # prompts

    @property
    def writer(self) -> Writer:
        """For the rooms of this package only."""
        return self._writer

    @property
    def max_pending_groups(self) -> int:
        return self._rules.policy.max_pending_groups

    async def submit(self, submissions: Sequence[Submission], *, final: bool | None = None) -> list[tuple[str, str]]:
        """All or nothing; (group_id, prompt_id) in the order given. Raises Conflict, QueueFull, InvalidField.

        A known identity with the same content is not submitted twice: its group's id comes back (design 4.10).
        """
        if final and self._intake is not None and not self._intake.done:
            raise Conflict("prompts.path is still being read; the input is final when its last epoch has been read")
        return await self.take(submissions, final=bool(final))

    async def take(
        self, submissions: Sequence[Submission], *, final: bool = False, read_position: int | None = None
    ) -> list[tuple[str, str]]:
        """As `submit`, for the prompts file too: `read_position` is committed together with the groups."""
        writer = self._writer
        async with self._submitting:
            writer.require_open()
            known = await self._known({(s.prompt.prompt_id, s.prompt.epoch) for s in submissions})
            writer.require_open()
            seqs, new = self._number(submissions, known)
            self._check_room(new)
            if new:
                writer.submit(new)
            if final and not writer.core.final:
                writer.core.finish_input()
            if read_position is not None:
                writer.read_to(read_position)
            writer.turn()
            await writer.committer.committed()
        return [(group_id(seq), s.prompt.prompt_id) for seq, s in zip(seqs, submissions, strict=True)]

    async def _known(self, keys: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], tuple[int, bytes]]:
        here = self._writer.keys
        missing = [key for key in keys if key not in here]
        stored = await self._store.find_prompts(missing) if missing else {}
        return {key: (found.seq, found.digest) for key, found in stored.items()} | {
            key: here[key] for key in keys if key in here
        }

    def _number(
        self, submissions: Sequence[Submission], known: Mapping[tuple[str, int], tuple[int, bytes]]
    ) -> tuple[list[int], dict[int, NewGroup]]:
        """The seq of every submission, and those that are new. Raises Conflict for a known identity, other content."""
        now, core = self._clock(), self._writer.core
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

    def _check_room(self, new: Mapping[int, NewGroup]) -> None:
        """Pending groups are bounded in number and, with all outstanding prompts, in bytes (design 4.7)."""
        policy, writer = self._rules.policy, self._writer
        if len(new) > policy.max_pending_groups:
            raise InvalidField(
                f"prompts: {len(new)} new ones in a call, but groups.max_pending_groups is {policy.max_pending_groups}"
            )
        if writer.core.pending + len(new) > policy.max_pending_groups:
            raise QueueFull(
                f"{writer.core.pending} groups are pending and {len(new)} more would exceed groups.max_pending_groups "
                f"= {policy.max_pending_groups}; send them again later",
                pending=writer.core.pending,
            )
        size = sum(prompt_size(entry.prompt) for entry in new.values())
        if new and writer.prompts and writer.prompt_bytes + size > policy.max_ready_bytes:
            raise QueueFull(
                f"prompts of outstanding groups take {writer.prompt_bytes} bytes and {size} more would exceed "
                f"groups.max_ready_bytes = {policy.max_ready_bytes}; send them again later"
            )

    # leases

    async def lease(self, request: LeaseRequest, hung_up: Awaitable[None] | None = None) -> LeaseAnswer:
        """Wait for scored groups. Raises Halted, Conflict (design 4.2), StoreUnavailable, HungUp (`hung_up` ended)."""
        writer = self._writer
        writer.require_open()
        writer.core.expire(now=self._clock())
        waiter = await self._place_for(request)
        if isinstance(waiter, Lease):
            outcome: Outcome = waiter
            writer.turn()  # what `expire` changed
        else:
            writer.turn()
            outcome = await self._wait(waiter, request.wait_s, hung_up)
        if isinstance(outcome, LeaseStatus):
            return LeaseAnswer(status=outcome, policy_version=self.version, outstanding=writer.core.outstanding)
        return await self._answer(outcome)

    async def _place_for(self, request: LeaseRequest) -> Waiter | Lease:
        """The live lease of this `request_id`, the waiter to share, or a new place at the end of the line."""
        if request.request_id is not None:
            found = self._same_request(request)
            if found is None:
                await self._writer.committer.committed()
                stored = await self._store.lease_by_request(request.request_id)
                self._writer.require_open()
                found = self._same_request(request)  # it may have come while we asked
                if found is None and stored is not None:
                    raise Conflict(
                        f"request_id {request.request_id!r} made lease {stored.lease_id}, which has ended; "
                        "a new lease needs a new request_id",
                        lease_id=stored.lease_id,
                    )
            if found is not None:
                return found
        waiter = Waiter(request)
        self._writer.line.join(waiter)
        return waiter

    def _same_request(self, request: LeaseRequest) -> Waiter | Lease | None:
        """Raises Conflict where the id was used with other parameters."""
        waiter = self._writer.line.by_request(request.request_id or "")
        if waiter is not None:
            _check_same(waiter.request.parameters, request)
            return waiter
        for lease in self._writer.core.leases.values():
            if lease.request_id == request.request_id:
                _check_same((lease.max_groups, lease.min_groups, lease.lease_s), request, lease)
                return lease
        return None

    async def _wait(self, waiter: Waiter, wait_s: float, hung_up: Awaitable[None] | None) -> Outcome:
        writer = self._writer
        gone = asyncio.ensure_future(hung_up) if hung_up is not None else None
        waiter.callers += 1
        try:
            waiting: set[asyncio.Future[Any]] = {waiter.future} if gone is None else {waiter.future, gone}
            done, _ = await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done and waiter.granted is not None:  # decided in time, not yet on disk
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if waiter.future in done:
                return waiter.future.result()
            if gone is not None and gone in done:
                raise HungUp
            return LeaseStatus.EMPTY
        finally:
            if gone is not None and gone is not hung_up:
                gone.cancel()
            waiter.callers -= 1
            if not waiter.callers and waiter.granted is None:
                writer.line.leave(waiter)
                writer.touch()  # the next in line may be content with what was too little for this one

    async def _answer(self, lease: Lease) -> LeaseAnswer:
        """The lease with the payloads of those of its groups that it still holds or that were acked under it."""
        payloads = [
            payload
            for payload in await self._store.payloads([seq for seq, _ in lease.groups])
            if payload.group.attempt == lease.attempt_of(payload.group.seq)
            and lease.lease_id in (payload.group.lease_id, payload.group.acked_by)
            and payload.score is not None
        ]
        return LeaseAnswer(
            status=LeaseStatus.OK if payloads else LeaseStatus.EMPTY,
            policy_version=lease.policy_version,
            outstanding=self._writer.core.outstanding,
            lease=lease if payloads else None,
            payloads=payloads,
        )

    async def abandon(self, lease: Lease) -> None:
        """The answer with `lease` did not reach its caller: without a `request_id` nobody could fetch it again."""
        if lease.request_id is None:
            self._writer.core.release(lease.lease_id, None, now=self._clock())
            self._writer.turn()

    async def ack(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Rule 4.3. The ids asked for, all of them acked under this lease now. Raises NotFound, Conflict."""
        while True:
            lease, members, ended = await self._members(lease_id, group_ids)
            core = self._writer.core
            core.expire(now=self._clock())
            if lease.state is LeaseState.LIVE and lease_id not in core.leases:
                self._writer.turn()
                continue  # it ended while we looked
            if any(seq not in core.groups and seq not in ended for seq in members):
                continue  # a group ended while we looked
            break

        def find(seq: int) -> Group | None:
            return core.groups.get(seq) or ended.get(seq)

        try:
            core.ack(lease, members, find, now=self._clock())
        except NotHeld as error:
            self._writer.turn()
            if error.group is None:
                raise NotFound(f"there is no group {group_id(error.seq)}") from error
            raise Conflict(
                f"group {error} now and may not be acked under lease {lease_id}; nothing of this call was done",
                group_id=group_id(error.seq),
                state=error.group.state,
            ) from error
        self._writer.turn()
        await self._writer.committer.committed()
        return [group_id(seq) for seq in members]

    async def _members(
        self, lease_id: str, group_ids: Sequence[str] | None
    ) -> tuple[Lease, list[int], Mapping[int, Group]]:
        """A lease, the groups of it that a call names (default: all), and the standing of those that have ended."""
        writer = self._writer
        writer.require_open()
        lease = writer.core.leases.get(lease_id)
        if lease is None:
            await writer.committer.committed()
            lease = await self._store.lease(lease_id)
            if lease is None:
                raise NotFound(f"there is no lease {lease_id!r}")
        members = [seq for seq, _ in lease.groups]
        if group_ids is not None:
            members = []
            for name in dict.fromkeys(group_ids):
                seq = group_seq(name)
                if seq is None or not 0 < seq <= writer.core.last_seq:
                    raise NotFound(f"there is no group {name!r}")
                members.append(seq)
        missing = [seq for seq in members if seq not in writer.core.groups]
        if not missing:
            return lease, members, {}
        await writer.committer.committed()
        ended = await self._store.groups(missing)
        writer.require_open()
        return lease, members, {seq: group for seq, group in ended.items() if group.state.terminal}

    async def release(self, lease_id: str, group_ids: Sequence[str] | None) -> list[str]:
        """Give groups back (default: all the lease still holds); the ids that were held and are not any more.

        What the lease does not hold is left alone, so that a release can be repeated. Raises NotFound.
        """
        writer = self._writer
        lease, members, _ = await self._members(lease_id, group_ids)
        strangers = [seq for seq in members if lease.attempt_of(seq) is None]
        if strangers:
            raise NotFound(f"group {group_id(strangers[0])} is not of lease {lease_id}")
        writer.core.expire(now=self._clock())
        released = writer.core.release(lease_id, members, now=self._clock())
        writer.turn()
        await writer.committer.committed()
        return [group_id(seq) for seq in released]

    async def renew(self, lease_id: str, lease_s: int | None) -> Lease:
        """Extend a live lease, by its own `lease_s` where none is given. Raises NotFound, Conflict."""
        writer = self._writer
        lease, _, _ = await self._members(lease_id, [])
        now = self._clock()
        writer.core.expire(now=now)
        renewed = writer.core.renew(lease_id, lease.lease_s if lease_s is None else lease_s, now=now)
        writer.turn()
        if renewed is None:
            raise Conflict(f"lease {lease_id} is over and cannot be renewed", lease_id=lease_id)
        await writer.committer.committed()
        return renewed

    # groups

    async def group(self, public_id: str) -> GroupView:
        """Everything there is of one group. Raises NotFound."""
        seq = self._seq(public_id)
        await self._settled()
        payloads = await self._store.payloads([seq])
        if not payloads:
            raise NotFound(f"there is no group {public_id!r}")
        payload = payloads[0]
        group = self._writer.core.groups.get(seq)
        in_flight = self._writer.work.in_flight(seq, group.attempt, group.running) if group is not None else {}
        return GroupView(payload=payload, in_flight=in_flight, policy_version=self.version, now=self._clock())

    async def groups(self, states: Collection[GroupState], *, after: int, limit: int) -> Sequence[Group]:
        """Groups in `states` (empty: any) with a number above `after`, in submission order."""
        await self._settled()
        return await self._store.list_groups(states, after=after, limit=limit)

    async def cancel(self, public_id: str) -> Group:
        """Drop an outstanding group. Raises NotFound, Conflict where it has ended."""
        writer = self._writer
        writer.require_open()
        seq = self._seq(public_id)
        writer.seal_leases()
        if not writer.core.cancel(seq, now=self._clock()):
            await self._settled()
            known = await self._store.groups([seq])
            if seq not in known:
                raise NotFound(f"there is no group {public_id!r}")
            raise Conflict(f"group {public_id} has ended as {known[seq].state}", state=known[seq].state)
        writer.turn()
        await writer.committer.committed()
        return (await self._store.groups([seq]))[seq]

    def _seq(self, public_id: str) -> int:
        seq = group_seq(public_id)
        if seq is None:
            raise NotFound(f"there is no group {public_id!r}")
        return seq

    async def _settled(self) -> None:
        """Reads show what is committed, and everything decided before them; a broken store can still be read."""
        if self._writer.broken is None and not self._writer.closing:
            await self._writer.committer.committed()

    # operators

    async def pause(self) -> None:
        """No new engine request until `resume`, across restarts."""
        self._writer.require_open()
        self._writer.core.pause()
        self._writer.turn()
        await self._writer.committer.committed()

    async def resume(self) -> None:
        """Clear a pause and a halt."""
        self._writer.require_open()
        self._writer.core.resume()
        self._writer.turn()
        await self._writer.committer.committed()

    def status(self) -> StatusView:
        """One consistent look, from counters only."""
        writer, core = self._writer, self._writer.core
        blocked = core.blocked()
        return StatusView(
            policy_version=core.version,
            max_staleness=self._rules.policy.group.max_staleness,
            counts=core.counts,
            slots_total=self._rules.policy.slots,
            slots_used=core.in_flight,
            paused=core.paused,
            halt=core.halt,
            final=core.final,
            blocked=None if blocked is None else str(blocked),
            oldest=core.groups[min(core.groups)] if core.groups else None,
            store_ok=writer.broken is None,
            store_error=None if writer.broken is None else str(writer.broken),
            leases=len(core.leases),
            waiting_lease_calls=len(writer.line),
            read_position=writer.run.read_position,
            now=self._clock(),
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


def _check_same(parameters: tuple[int, int, int], request: LeaseRequest, lease: Lease | None = None) -> None:
    if parameters != request.parameters:
        names = ("max_groups", "min_groups", "lease_s")
        was = ", ".join(f"{name} {value}" for name, value in zip(names, parameters, strict=True))
        facts = {} if lease is None else {"lease_id": lease.lease_id}
        raise Conflict(f"request_id {request.request_id!r} was used with {was}", **facts)
