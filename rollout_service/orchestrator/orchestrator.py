"""The calls of the service: each one checks, asks the writer, and answers only what is committed.

What always holds: a call that raises has changed nothing; a call that returns has its effect on disk; a call that is
cancelled or whose caller has gone leaves no lease behind that nobody can fetch. The calls of each resource stand in a
module of their own; this one puts them together, and has those of the run as a whole.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from rollout_service.core.changes import Bumped
from rollout_service.core.model import Prompt
from rollout_service.core.scheduler import VersionTooLow
from rollout_service.errors import Conflict
from rollout_service.orchestrator.checkpoint_calls import CheckpointCalls
from rollout_service.orchestrator.group_calls import GroupCalls
from rollout_service.orchestrator.intake import Intake, PromptSource
from rollout_service.orchestrator.lease_calls import LeaseCalls
from rollout_service.orchestrator.parts import Clock, Engines, Observer, RolloutRunner, Scorer
from rollout_service.orchestrator.prompt_calls import PromptCalls
from rollout_service.orchestrator.versions import say_stale, too_low
from rollout_service.orchestrator.views import StatusView, Submission
from rollout_service.orchestrator.workshop import Rules
from rollout_service.orchestrator.writer import Writer
from rollout_service.store.protocol import Store


class Orchestrator(PromptCalls, LeaseCalls, GroupCalls, CheckpointCalls):
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
        steady: Clock = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`clock`: Unix seconds. `steady`: seconds, by a clock that nobody sets."""
        if (source is None) is not (digest is None):
            raise ValueError("a prompt source and the digest of its prompts come together")
        writer = Writer(
            rules,
            store=store,
            runner=runner,
            scorer=scorer,
            engines=engines,
            observer=observer,
            clock=clock,
            steady=steady,
            new_id=new_id,
        )
        super().__init__(writer, store, rules, clock)
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

    async def post_version(self, version: int, *, reset: bool = False) -> Bumped:
        """Rule 3.1.7. Raises Conflict where the version is lower than the current one and `reset` is not set."""
        writer = self._writer
        writer.require_open()
        try:
            bumped = writer.post_version(version, reset=reset)
        except VersionTooLow as error:
            await writer.settled()  # what it contradicts must be so for good
            raise too_low(error) from error
        # In a commit of its own: what fills the slots again must not delay what frees them.
        writer.collect()
        writer.committer.seal()
        await writer.committer.committed()
        writer.turn()
        say_stale(bumped)
        return bumped

    # prompts

    async def submit(self, submissions: Sequence[Submission], *, final: bool | None = None) -> list[tuple[str, str]]:
        """All or nothing; (group_id, prompt_id) in the order given. Raises Conflict, QueueFull, InvalidField.

        A known identity with the same content is not submitted twice: its group's id comes back (design 4.10).
        """
        if final and self._intake is not None and not self._intake.done:
            raise Conflict("prompts.path is still being read; the input is final when its last epoch has been read")
        return await self.take(submissions, final=bool(final))

    # operators

    async def pause(self) -> None:
        """No new engine request until `resume`, across restarts."""
        self._writer.require_open()
        self._writer.core.pause()
        self._writer.turn()
        await self._writer.settled()

    async def resume(self) -> None:
        """Clear a pause and a halt."""
        self._writer.require_open()
        self._writer.resume()
        self._writer.turn()
        await self._writer.settled()

    async def refresh(self) -> None:
        """Bring `status` up to date; here it always is."""

    def status(self) -> StatusView:
        """One consistent look, from counters only."""
        writer, core = self._writer, self._writer.core
        blocked = core.blocked()
        return StatusView(
            policy_version=writer.version,
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
            closing=writer.closing,
        )
