"""`rollout-service top`: the live view of a terminal.

What always holds: the screen is drawn again every interval, news or not, so that a lost connection is seen; once the
service was seen, a lost connection is tried again for ever, and only a refusal ends the view; the terminal is given
back as it was, however the view ends.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live as Screen

from rollout_service.console.frame import Link, frame
from rollout_service.console.service import Service, ServiceProblem
from rollout_service.console.shapes import Live
from rollout_service.console.text import words

RETRY_FIRST_S, RETRY_MOST_S = 0.5, 5.0
ONE_FRAME_EVENTS = 10


def one_frame(service: Service, console: Console) -> None:
    """Print the run as it is now. Raises ServiceProblem."""
    live = service.shape(Live, "/live")
    console.print(frame(live, url=service.url, width=console.width, recent=ONE_FRAME_EVENTS))


def watch(service: Service, console: Console, *, interval_s: float) -> None:
    """Draw the run until Ctrl-C. Raises ServiceProblem where the service refuses, or was never reached."""
    with suppress(KeyboardInterrupt), _terminated_cleanly():
        asyncio.run(_watch(service, console, interval_s))


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
    """SIGTERM unwinds like an exit, so that the terminal is given back."""

    def leave(signum: int, _: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _watch(service: Service, console: Console, interval_s: float) -> None:
    view = View(service)
    reading = asyncio.get_running_loop().create_task(view.keep_reading())
    try:
        with Screen(console=console, screen=True, auto_refresh=False) as screen:
            while not reading.done():
                screen.update(view.draw(console.width), refresh=True)
                # The first answer is shown at once, later ones at the next interval.
                waited = interval_s if view.seen else min(interval_s, 0.1)
                await asyncio.wait({reading}, timeout=waited)
    finally:
        reading.cancel()
        await asyncio.wait({reading})
    reading.result()


class View:
    """The last answer, and how the connection stands."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._live: Live | None = None
        self._heard_at = 0.0
        self._lost: str | None = None

    @property
    def seen(self) -> bool:
        """Whether there was an answer at all."""
        return self._live is not None

    def draw(self, width: int) -> RenderableType:
        """What is to be shown now."""
        if self._live is None:
            return words(f"Asking {self._service.url} …")
        lost_for = None if self._lost is None else time.monotonic() - self._heard_at
        return frame(
            self._live, url=self._service.url, link=Link(lost_for_s=lost_for, why=self._lost or ""), width=width
        )

    async def keep_reading(self) -> None:
        """Never returns. Raises ServiceProblem where trying again makes no sense."""
        pause = RETRY_FIRST_S
        while True:
            try:
                async for live in self._service.events():
                    self._live, self._heard_at, self._lost = live, time.monotonic(), None
                    pause = RETRY_FIRST_S
                if not self.seen:
                    raise ServiceProblem(f"GET {self._service.url}/events: it ended without a word; is --url right?")
                self._lost = "The service ended the stream."
            except ServiceProblem as problem:
                if not problem.passing or not self.seen:
                    raise
                self._lost = str(problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MOST_S)
