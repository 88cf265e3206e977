"""Worker processes for sync reward functions.

At most `processes` calls run at a time, on `processes + 1` warm workers: whoever kills one finds another one ready.
A call's time starts when a worker starts on it. Callers are served first come, first served. A caller that is
cancelled leaves its call running (a kill costs the imports again) unless another caller waits for the worker. A caller
never waits for workers that cannot start: it is told why.
"""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from rollout_service.errors import ConfigError
from rollout_service.rewards.outcome import Outcome, timed_out
from rollout_service.rewards.process import Worker
from rollout_service.rewards.wire import Ready, Setup

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
"""Pause before a worker is started again after one failed by itself, doubling: a broken import must not spin."""

STOP_S = 5.0
"""How long `stop` waits for killed workers; longer means a process the kernel cannot end (stuck in I/O)."""


class _Call:
    __slots__ = ("abandoned", "data", "future", "timeout_s", "timer")

    def __init__(self, data: bytes, timeout_s: float, future: asyncio.Future[Outcome]) -> None:
        self.data = data
        self.timeout_s = timeout_s
        self.future = future
        self.timer: asyncio.TimerHandle | None = None
        self.abandoned = False

    def settle(self, outcome: Outcome) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(outcome)


class WorkerPool:
    """Runs calls of the functions in `setup`. One event loop only."""

    def __init__(self, *, processes: int, setup: Setup, start_timeout_s: float) -> None:
        self._processes = processes
        self._setup = setup
        self._start_timeout_s = start_timeout_s
        self._idle: list[Worker] = []
        self._busy: dict[Worker, _Call] = {}
        self._starting: set[Worker] = set()
        self._resting = 0  # workers to be started after a pause
        self._living: set[Worker] = set()  # every process that has not ended, killed ones included
        self._waiting: deque[_Call] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # workers that failed by themselves since the last answer
        self._fault = ""
        self._stopped = False

    async def start(self) -> Ready:
        """Starts every worker; the hand-shake of one. Raises ConfigError when one cannot start."""
        try:
            hands = await asyncio.gather(*(self._launch(self._new()) for _ in range(self._processes + 1)))
        except BaseException:
            await self.stop()
            raise
        return hands[0]

    async def call(self, data: bytes, timeout_s: float) -> Outcome:
        """Sends a call's frame to the next free worker. Timeouts and dead workers are outcomes, not exceptions."""
        loop = asyncio.get_running_loop()
        call = _Call(data, timeout_s, loop.create_future())
        if self._stopped:
            raise asyncio.CancelledError
        self._waiting.append(call)
        self._dispatch()
        try:
            return await call.future
        except asyncio.CancelledError:
            call.abandoned = True
            if call in self._waiting:
                self._waiting.remove(call)
            self._dispatch()
            raise

    async def stop(self) -> None:
        """Kills every worker. Calls under way are cancelled: a shutdown must not look like a failed reward."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        for call in [*self._waiting, *self._busy.values()]:
            if call.timer is not None:
                call.timer.cancel()
            call.future.cancel()
        self._waiting.clear()
        self._busy.clear()
        self._idle.clear()
        living = list(self._living)
        for worker in living:
            worker.kill()
        if living:
            await asyncio.wait([worker.ended for worker in living], timeout=STOP_S)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _dispatch(self) -> None:
        while self._waiting:
            if len(self._busy) >= self._processes:
                abandoned = next((worker for worker, call in self._busy.items() if call.abandoned), None)
                if abandoned is None:
                    return
                self._remove(abandoned)
            elif self._idle:
                self._run(self._idle.pop(), self._waiting.popleft())
            elif self._busy or self._starting:
                return
            else:  # nobody is there and nobody is coming soon
                self._waiting.popleft().settle(Outcome(error=self._fault))

    def _run(self, worker: Worker, call: _Call) -> None:
        self._busy[worker] = call
        call.timer = asyncio.get_running_loop().call_later(call.timeout_s, self._time_is_up, worker, call)
        worker.send(call.data)
        call.data = b""

    def _time_is_up(self, worker: Worker, call: _Call) -> None:
        if self._busy.get(worker) is not call:
            return
        self._remove(worker)
        call.settle(timed_out(call.timeout_s))
        self._dispatch()

    def _answered(self, worker: Worker, outcome: Outcome) -> None:
        call = self._busy.pop(worker, None)
        if call is None:  # it was killed while its answer was on the way
            return
        self._failures = 0
        self._idle.append(worker)
        call.settle(outcome)
        self._dispatch()

    def _remove(self, worker: Worker) -> None:
        """Kills a worker and has another one started."""
        call = self._busy.pop(worker, None)
        if call is not None and call.timer is not None:
            call.timer.cancel()
        worker.kill()
        self._fill()

    def _ended(self, worker: Worker, how: str) -> None:
        self._living.discard(worker)
        call = self._busy.pop(worker, None)
        if call is not None:
            call.settle(Outcome(error=f"its worker died while it scored: {how}"))
        elif worker in self._idle:
            self._idle.remove(worker)
            self._failed(f"a reward worker died while it had nothing to do: {how}")
        else:  # killed by us, or it never started: whoever did or waited knows
            return
        self._fill()
        self._dispatch()

    def _failed(self, fault: str) -> None:
        self._failures += 1
        self._fault = fault
        structlog.get_logger(__name__).error("reward_worker_failed", error=fault, failures=self._failures)

    def _fill(self) -> None:
        """Has as many workers started as are missing."""
        if self._stopped:
            return
        there = len(self._idle) + len(self._busy) + len(self._starting) + self._resting
        for _ in range(self._processes + 1 - there):
            if self._failures:
                self._resting += 1
                pause = min(FIRST_BACKOFF_S * 2 ** min(self._failures - 1, 10), MAX_BACKOFF_S)
                task = asyncio.get_running_loop().create_task(self._replace(None, pause))
            else:
                task = asyncio.get_running_loop().create_task(self._replace(self._new(), 0.0))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replace(self, worker: Worker | None, pause_s: float) -> None:
        if worker is None:
            await asyncio.sleep(pause_s)
            self._resting -= 1
            worker = self._new()
        try:
            await self._launch(worker)
        except ConfigError as error:
            self._failed(str(error))
            self._fill()
        self._dispatch()

    def _new(self) -> Worker:
        worker = Worker(on_outcome=self._answered, on_end=self._ended)
        self._starting.add(worker)
        return worker

    async def _launch(self, worker: Worker) -> Ready:
        self._living.add(worker)
        try:
            async with asyncio.timeout(self._start_timeout_s):
                ready = await worker.start(self._setup)
        except TimeoutError as error:
            worker.kill()
            what = ", ".join(target for _, target in self._setup.functions)
            raise ConfigError(f"a reward worker did not start within {self._start_timeout_s:g} s ({what})") from error
        except BaseException:
            worker.kill()
            raise
        finally:
            self._starting.discard(worker)
        if worker.ended.done():  # it died right after its hand-shake
            raise ConfigError(f"a reward worker died as soon as it had started: {worker.ended.result()}")
        self._idle.append(worker)
        return ready
