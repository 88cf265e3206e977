"""One session with an OpenEnv server: a client that is never waited for longer than it may take.

What always holds: every call ends within its limit, or at once when its task is cancelled, whatever the client does; a
session that is left has its connection closed, hard where the client does not do it in time, and nobody waits for that;
an answer never comes from another session than the one that was reset.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog

from rollout_service.core.model import FailureReason
from rollout_service.errors import ConfigError
from rollout_service.loading import clean
from rollout_service.rollouts.faults import ProgramFault

CLOSE_S = 2.0
"""A polite close may take so long in the background; then the connection is aborted."""
CAPACITY_REACHED = "CAPACITY_REACHED"
VALIDATION_ERROR = "VALIDATION_ERROR"
LOST = "the connection to the environment was lost, and the episode with it"
SHOWN = 300
"""Characters of an action that an error shows."""
_SERVER_ERROR = re.compile(r"Server error: .* \(code: (\w+)\)\Z", re.DOTALL)

log = structlog.get_logger(__name__)


class Client(Protocol):
    """What is used of openenv's GenericEnvClient."""

    def connect(self) -> Awaitable[Any]: ...

    def reset(self, **arguments: Any) -> Awaitable[Any]:
        """Gives `.observation`, `.reward`, `.done`, as step does."""
        ...

    def step(self, action: Any) -> Awaitable[Any]: ...

    def close(self) -> Awaitable[None]: ...


class Unavailable(Exception):
    """No session for now: the server is full, or cannot be reached. Nothing of an episode is lost."""

    def __init__(self, detail: str, *, full: bool) -> None:
        super().__init__(detail)
        self.full = full


class EnvironmentFault(ProgramFault):
    """The environment failed; the rollout failed with it."""

    def __init__(self, detail: str) -> None:
        super().__init__(clean(detail), FailureReason.ENVIRONMENT)


def make_clients(url: str, *, step_timeout_s: float) -> Callable[[], Client]:
    """Makes a client for each session. ConfigError where openenv cannot be imported.

    Here and not at the first rollout: the import takes seconds, in which the event loop would stand still.
    """
    try:
        generic = importlib.import_module("openenv.core.generic_client").GenericEnvClient
    except ModuleNotFoundError as error:
        if error.name != "openenv":
            raise ConfigError(f"program.openenv: openenv is incomplete: no module named {error.name!r}") from error
        raise ConfigError("program.openenv needs openenv: pip install 'rollout-service[openenv]'") from error
    except Exception as error:
        detail = clean(f"{type(error).__name__}: {error}", 500)
        raise ConfigError(f"program.openenv: importing openenv raised {detail}") from error

    def make() -> Client:
        client: Client = generic(
            base_url=url,
            connect_timeout_s=step_timeout_s,
            message_timeout_s=2 * step_timeout_s,  # the limit of the session comes first
            # Pings keep proxies from closing the connection during a long generation; a server that is too busy to
            # answer them has not lost the episode.
            websocket_ping_timeout_s=None,
            mode="simulation",
        )
        return client

    return make


class Session:
    """An episode's connection. All methods belong to the event loop."""

    def __init__(self, client: Client, *, step_timeout_s: float) -> None:
        self._client, self._limit_s = client, step_timeout_s
        self._socket: Any = None
        """The connection that was reset; the client puts another in its place when it loses one."""
        self._ended = False

    async def reset(self, arguments: Mapping[str, Any]) -> Any:
        """The first observation. Raises Unavailable, EnvironmentFault."""
        try:
            await self._call(self._client.connect, "a connection")
        except (OSError, _Silent) as error:
            raise Unavailable(str(error), full=False) from error
        self._socket = self._current_socket()
        try:
            return await self._call(lambda: self._client.reset(**arguments), "a reset")
        except _Silent as error:
            raise EnvironmentFault(str(error)) from error
        except Exception as error:
            if server_error_code(error) == CAPACITY_REACHED:
                raise Unavailable(str(error), full=True) from error
            if self._is_lost(error):
                raise Unavailable(f"the connection closed during the reset: {error}", full=False) from error
            raise _fault("reset", error) from error

    async def step(self, action: Mapping[str, Any]) -> Any:
        """The next observation. Raises EnvironmentFault."""
        if self._is_lost():
            raise EnvironmentFault(LOST)
        try:
            result = await self._call(lambda: self._client.step(dict(action)), "a step")
        except _Silent as error:
            raise EnvironmentFault(str(error)) from error
        except Exception as error:
            if self._is_lost(error):
                raise EnvironmentFault(f"{LOST}: {error}") from error
            if server_error_code(error) == VALIDATION_ERROR:
                # The client drops which field it was. Nearly always the mapping: the environment's actions differ.
                sent = json.dumps(action, ensure_ascii=False)[:SHOWN]
                raise EnvironmentFault(f"{error}; the action was {sent} (see program.openenv_action)") from error
            raise _fault("step", error) from error
        if self._is_lost():  # the client connected anew, and the answer is another environment's
            raise EnvironmentFault(LOST)
        return result

    def leave(self) -> None:
        """The episode is over: a polite close in the background, a hard one after CLOSE_S."""
        if not self._ended:
            self._ended = True
            _in_background(self._close())

    def cut(self) -> None:
        """Nothing of this session is wanted any more: the connection is aborted now."""
        self._ended = True
        for socket in (self._socket, self._current_socket()):
            _abort(socket)

    async def _call(self, call: Callable[[], Awaitable[Any]], what: str, limit_s: float | None = None) -> Any:
        """What `call` gives. _Silent after the limit, by default step_timeout_s.

        In a task of its own, because the client may not heed its end.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        work = asyncio.ensure_future(_awaited(call))
        try:
            await asyncio.wait({work}, timeout=limit_s)
            if work.done():
                return work.result()
            raise _Silent(f"the environment did not answer {what} within {limit_s:g} s")
        finally:
            if not work.done():
                # The connection first: a client that is told to end hides it, to close it in ten seconds.
                self.cut()
                work.cancel()
                _BACKGROUND.add(work)
                work.add_done_callback(self._call_has_ended)

    def _call_has_ended(self, work: asyncio.Future[Any]) -> None:
        _has_ended(work)
        self.cut()  # it may have connected meanwhile

    async def _close(self) -> None:
        try:
            await self._call(self._client.close, "a close", CLOSE_S)
        except Exception as error:  # the episode is over: a close that fails costs nobody anything
            log.info("openenv_close_failed", error=clean(f"{type(error).__name__}: {error}", 200))
        finally:
            self.cut()

    def _is_lost(self, error: BaseException | None = None) -> bool:
        if isinstance(error, OSError) or type(error).__name__.startswith("ConnectionClosed"):
            return True
        socket = self._current_socket()
        # By name: the enum is websockets', which is openenv's dependency and not ours.
        state = getattr(getattr(socket, "state", None), "name", "OPEN")
        return socket is not self._socket or state != "OPEN"

    def _current_socket(self) -> Any:
        # Not public in openenv 0.10; without it a session could only be closed when its client agrees.
        return getattr(self._client, "_ws", None)


class _Silent(Exception):
    """No answer within the limit."""


_BACKGROUND: set[asyncio.Future[Any]] = set()
"""Closes and cancelled calls that nobody waits for: a task nobody refers to may be collected half-way."""


def server_error_code(error: BaseException) -> str | None:
    """The code of an error that the environment's server reported; None for any other."""
    found = _SERVER_ERROR.match(str(error)) if isinstance(error, RuntimeError) else None
    return found[1] if found else None


def _fault(call: str, error: Exception) -> EnvironmentFault:
    if server_error_code(error) is not None:
        return EnvironmentFault(str(error))
    return EnvironmentFault(f"the environment's {call} raised {type(error).__name__}: {error}")


async def _awaited(call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


def _in_background(work: Any) -> None:
    task = asyncio.ensure_future(work)
    _BACKGROUND.add(task)
    task.add_done_callback(_has_ended)


def _has_ended(work: asyncio.Future[Any]) -> None:
    _BACKGROUND.discard(work)
    if not work.cancelled():
        work.exception()  # looked at, so that asyncio does not complain that nobody did


def _abort(socket: Any) -> None:
    transport = getattr(socket, "transport", None)
    if transport is not None:
        transport.abort()


__all__ = ["CAPACITY_REACHED", "CLOSE_S", "Client", "EnvironmentFault", "Session", "Unavailable", "make_clients"]
