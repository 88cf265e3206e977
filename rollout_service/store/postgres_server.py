"""Where PostgreSQL is, how a connection to it is made, and what its errors mean.

What always holds: a connection is to a server that takes writes; one host of several that does not answer keeps nobody
from the next; every reason that is told is one line and shows no password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from enum import StrEnum, auto
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit, urlunsplit

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from asyncpg.exceptions import InternalClientError, OutdatedSchemaCacheError

from rollout_service.errors import ConfigError, StoreUnavailable

if TYPE_CHECKING:
    from typing import TypeAlias

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

T = TypeVar("T")

DATABASE_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    InternalClientError,
    ConnectionError,
    TimeoutError,
)
"""Whatever a connection may raise. Other OSErrors are of files: whoever works on a connection may read one."""

CONNECT_S: Final = 5.0
"""For one host: several tries of a lost packet, and less than a replica's claims usually live."""

ANSWER_S: Final = 2.0
"""How much later than the server's own timeout a statement is given up here: only a server that hangs, or a network
that is gone, lets it come to that."""


class Trouble(StrEnum):
    """What an error asks for."""

    COLLISION = auto()
    """Somebody else was faster; the same transaction may well succeed now."""
    READ_ONLY = auto()
    """The server is no primary any more; another one is."""
    LOST = auto()
    """The connection is of no use, and others as old may be neither."""
    OTHER = auto()
    """The database refused."""


_COLLISIONS: Final = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,
    # A migration beside us: what the driver knew of the tables is out of date, and it has forgotten it by now.
    asyncpg.InvalidCachedStatementError,
    OutdatedSchemaCacheError,
)
_LOST: Final = (
    InternalClientError,  # the server ended an idle transaction, and the driver has not read so yet
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    ConnectionError,
    TimeoutError,
)


def trouble(error: BaseException, connection: Connection) -> Trouble:
    """What `error`, met on `connection`, asks for."""
    if isinstance(error, _COLLISIONS):
        return Trouble.COLLISION
    if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
        return Trouble.READ_ONLY
    if connection.is_closed() or isinstance(error, _LOST):
        return Trouble.LOST
    return Trouble.OTHER


class Server:
    """The database of one URL. `pooled`: what answers there is a pooler, so that a connection keeps nothing of itself.

    Raises ConfigError for a URL that cannot be told apart from its password.
    """

    def __init__(self, url: str, *, statement_timeout_s: float) -> None:
        self.pooled = True
        """Until it is known: what is right behind a pooler is right without one."""
        self._statement_timeout_s = statement_timeout_s
        try:
            split = urlsplit(url)
            options = parse_qs(split.query)
        except ValueError as exc:
            raise ConfigError("store.url: no URL of a PostgreSQL database") from exc
        if url.count("@") > 1 or ("@" in url and "@" not in split.netloc):
            raise ConfigError(
                "store.url: special characters in the user's name and password are to be percent-encoded (@ is %40, "
                "/ is %2F, : is %3A, ? is %3F, # is %23)"
            )
        login, _, hosts = split.netloc.rpartition("@")
        password = login.partition(":")[2]
        self._secrets = {text for text in (password, unquote(password), *options.get("password", ())) if text}
        names = hosts or ",".join(options.get("host", ()))
        self.where = f"PostgreSQL at {names or 'its default address'}{split.path}"
        self._urls = [_with_host(split, login, host) for host in hosts.split(",")] if "," in hosts else [url]
        self._named = "application_name" in options

    def told(self, error: BaseException) -> str:
        """`error` in one line, without the password."""
        text = " ".join(f"{error}".split())
        if isinstance(error, TimeoutError) and not text:
            text = "no answer in time"
        if not text or any(secret in text for secret in self._secrets):
            text = type(error).__name__
        return f"{self.where}: {text}"

    async def connect(self) -> Connection:
        """A new connection. Raises StoreUnavailable."""
        failed = []
        for url in list(self._urls):
            try:
                connection = await within(CONNECT_S, self._connected(url))
            except (*DATABASE_ERRORS, OSError, ValueError) as exc:  # a ValueError is of the URL
                failed.append(exc)
                continue
            self._urls.remove(url)
            self._urls.insert(0, url)  # the others only where this one is a primary no more
            return connection
        reasons = "; ".join(dict.fromkeys(self.told(exc).removeprefix(f"{self.where}: ") for exc in failed))
        raise StoreUnavailable(f"cannot connect to {self.where}: {reasons}") from failed[-1]

    async def _connected(self, url: str) -> Connection:
        connection: Connection = await asyncpg.connect(
            url,
            target_session_attrs=SessionAttribute.read_write,
            statement_cache_size=0 if self.pooled else 200,
            command_timeout=self._statement_timeout_s + ANSWER_S,
            server_settings=None if self._named else {"application_name": "rollout-service"},
        )
        return connection


def _with_host(split: SplitResult, login: str, host: str) -> str:
    return urlunsplit(split._replace(netloc=f"{login}@{host}" if login else host))


async def within(seconds: float, awaited: Awaitable[T]) -> T:
    """What `awaited` gives. Raises TimeoutError where that takes longer."""
    async with asyncio.timeout(seconds):
        return await awaited
