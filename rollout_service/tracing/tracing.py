"""What the rest of the service is given to be traced.

What always holds: after `stop` no span is open and none is sent any more; it returns within STOP_S, whatever the
collector does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import structlog
from opentelemetry.sdk.trace import TracerProvider

from rollout_service import __version__
from rollout_service.orchestrator.parts import RolloutRunner
from rollout_service.tracing.calls import EngineCalls
from rollout_service.tracing.groups import GroupSpans
from rollout_service.tracing.rollouts import TracedRunner

STOP_S = 0.9
"""For what is still queued; the service gives each of its parts 1 s to end."""

log = structlog.get_logger(__name__)


class Tracing:
    """Observer of groups, wrapper of the runner, tracer of engine requests, over one provider that it owns.

    The provider is nobody else's: the process-wide one stays as it is, so that no library adds spans of its own.
    """

    def __init__(self, provider: TracerProvider, give_up: Callable[[], None] = lambda: None) -> None:
        """`give_up`: have the provider send nothing more, whatever it is doing; called where `stop` ran out of time."""
        self._provider, self._give_up = provider, give_up
        self._tracer = provider.get_tracer("rollout_service", __version__)
        self.observer = GroupSpans(self._tracer)
        self.calls = EngineCalls(self._tracer)

    def runner(self, inner: RolloutRunner) -> RolloutRunner:
        """`inner`, each of its rollouts in a span."""
        return TracedRunner(inner, self.observer, self._tracer)

    async def stop(self) -> None:
        """End what is open and send what is queued, as far as that goes within STOP_S."""
        self.observer.end_all()
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()

        def flush() -> None:
            try:
                self._provider.shutdown()
            finally:
                with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, sent)

        # A daemon, not an executor's thread: the exit of the process would wait for that one.
        threading.Thread(target=flush, name="traces-flush", daemon=True).start()
        try:
            async with asyncio.timeout(STOP_S):
                await sent
        except TimeoutError:
            self._give_up()
            log.warning("traces_not_flushed", after_s=STOP_S, detail="the collector does not answer in time")


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
