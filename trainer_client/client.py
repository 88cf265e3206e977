"""The two clients: thin drivers that perform what `core` asks for, one blocking and one for asyncio.

Both are built from the same calls, so neither has a rule of its own. A client may be used from several
threads, and survives a restart of the service. httpx and asyncio are imported when they are first used, not with this
module: together they cost more than everything else here.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import urlsplit

from trainer_client import loops
from trainer_client.core import Core, Flow, Pause, Request, Response
from trainer_client.errors import ClientError, ServiceUnreachable
from trainer_client.progress import Progress
from trainer_client.types import Lease, LeaseStatus

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import httpx

    from trainer_client.prefetch import AsyncPrefetch, Prefetch

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_S = 30.0
"""Longest wait for the service to say anything, beside the `wait_s` of a lease."""
RETRY_FOR_S = 60.0
"""Covers a restart of the service with many outstanding groups."""
KEY_VARIABLE = "ROLLOUT_SERVICE_KEY"
"""Environment variable with the API key of clients that are given none."""


def _blocking(call: Callable[Concatenate[Core, P], Flow[T]]) -> Callable[Concatenate[RolloutClient, P], T]:
    def method(self: RolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(call(self._core, *args, **kwargs))

    functools.update_wrapper(method, call)
    return method


def _awaited(
    call: Callable[Concatenate[Core, P], Flow[T]],
) -> Callable[Concatenate[AsyncRolloutClient, P], Coroutine[Any, Any, T]]:
    async def method(self: AsyncRolloutClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(call(self._core, *args, **kwargs))

    functools.update_wrapper(method, call)
    return method


class RolloutClient:
    """A blocking client of one rollout-service.

        with RolloutClient("http://127.0.0.1:8080") as client:
            for lease in client.leases(max_groups=8, min_groups=8):
                train(lease.groups)
                client.post_version(step)

    `api_key`: the service's API key; None: what the environment variable ROLLOUT_SERVICE_KEY holds; "": none. It goes
    to this address only (no redirect is followed), and into no text. `timeout_s`: longest silence of the service;
    `retry_for_s`: how long a call is tried again after its first failure; `consumer`: the name its leases carry;
    `binary`: ask for leases as safetensors, whose token arrays are numpy arrays (False: as JSON, whose are lists; a
    service that knows no other sends JSON anyway); `transport`: an httpx transport to use instead of the network.
    Raises the errors of `trainer_client.errors`, and ValueError for a URL that is not http(s) or a key that is none.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_for_s: float = RETRY_FOR_S,
        consumer: str | None = None,
        binary: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        import httpx

        self._url = _checked(url)
        self._core = Core(timeout_s=timeout_s, retry_for_s=retry_for_s, consumer=consumer, binary=binary)
        self._bars: list[Progress] = []
        self._own_transport = transport is not None
        self._key = _Key.of(api_key)
        self._http = httpx.Client(
            base_url=self._url,
            transport=transport,
            verify=_uses_tls(self._url),
            headers=self._key.headers(),
            follow_redirects=False,
        )

    post_version = _blocking(Core.post_version)
    version = _blocking(Core.version)
    submit = _blocking(Core.submit)
    lease = _blocking(Core.lease)
    ack = _blocking(Core.ack)
    release = _blocking(Core.release)
    renew = _blocking(Core.renew)
    status = _blocking(Core.status)
    group = _blocking(Core.group)
    groups = _blocking(Core.groups)
    cancel = _blocking(Core.cancel)
    pause = _blocking(Core.pause)
    resume = _blocking(Core.resume)
    engines = _blocking(Core.engines)
    add_engine = _blocking(Core.add_engine)
    remove_engine = _blocking(Core.remove_engine)
    metrics = _blocking(Core.metrics)
    create_checkpoint = _blocking(Core.create_checkpoint)
    checkpoints = _blocking(Core.checkpoints)
    delete_checkpoint = _blocking(Core.delete_checkpoint)
    rewind = _blocking(Core.rewind)

    def leases(
        self,
        max_groups: int = 8,
        min_groups: int = 1,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        progress: bool = False,
    ) -> Iterator[Lease]:
        """Leases with groups, one after the other; asking for the next acks the one before.

        Ends when the service is exhausted; goes on waiting while nothing is ready; raises `Halted`. Leaving the loop
        early (an exception, `break`) gives the groups of the lease in hand back, so ack it before a `break` once it is
        trained. A lease that was lost meanwhile (it ran out, a reset came) is named in a warning and the loop goes on.
        `progress`: a bar on the terminal, for which tqdm must be installed (else ImportError).
        """
        ask = _ask(max_groups, min_groups, wait_s, lease_s, consumer)
        with Progress(progress, self._bars) as bar:
            while True:
                bar.asked()
                lease = self._next_lease(ask)
                if lease is None:
                    continue
                if lease.status is LeaseStatus.EXHAUSTED:
                    bar.exhausted()
                    return
                if not lease.groups:
                    continue
                self._core.hold(lease)
                bar.handed(lease)
                try:
                    yield lease
                except BaseException:
                    self._run(self._core.give_back(lease.lease_id or ""))
                    raise
                bar.asked()
                try:
                    self._run(self._core.finish(lease))
                except BaseException:
                    self._run(loops.finish_late(self._core, lease))
                    raise

    def _next_lease(self, ask: dict[str, Any]) -> Lease | None:
        request_id = str(uuid.uuid4())
        try:
            return self._run(loops.next_lease(self._core, ask, request_id))
        except ClientError:
            raise
        except BaseException:  # an interrupt cut the call off; the lease may have been made all the same
            self._run(self._core.recover(ask, request_id))
            raise

    def prefetch(
        self,
        max_groups: int = 8,
        min_groups: int = 1,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        depth: int = 1,
        progress: bool = False,
    ) -> Prefetch:
        """As `leases`, but a background thread asks for the next ones while the trainer computes.

            with client.prefetch(max_groups=8) as leases:
                for lease in leases:
                    ...

        Up to `depth` leases wait beside the one in hand; all are renewed at half of `lease_s`. What has become too old
        by the time it is handed over is released, so a lease may have fewer groups than `min_groups`. A halt, or a
        service that is away, is raised only while the trainer waits: what passes while it computes costs nothing.
        Leaving the `with` block acks the lease in hand, or releases it when an exception is on its way.
        """
        from trainer_client.prefetch import Prefetch

        if self._own_transport:
            raise ValueError("prefetch works over the network only, not through a transport of one's own")
        ask = _ask(max_groups, min_groups, wait_s, lease_s, consumer)
        bar = Progress(progress, self._bars)
        connect = functools.partial(AsyncRolloutClient._sharing, self._url, self._key, self._core, self._bars)
        return Prefetch(connect, self._core, ask, depth, bar)

    def close(self) -> None:
        """Give back what loops still hold, and close the connections."""
        for lease_id in list(self._core.held):
            self._run(self._core.give_back(lease_id))
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, flow: Flow[T]) -> T:
        try:
            todo = next(flow)
            while True:
                if isinstance(todo, Pause):
                    time.sleep(todo.seconds)
                    todo = flow.send(None)
                    continue
                try:
                    response = self._perform(todo)
                except ServiceUnreachable as error:
                    todo = flow.throw(error)
                else:
                    if response.status < 400:
                        for bar in tuple(self._bars):
                            bar.answered(todo)
                    todo = flow.send(response)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    def _perform(self, request: Request) -> Response:
        import httpx

        try:
            with self._http.stream(**_arguments(request)) as answer:
                return _response(answer, answer.iter_bytes())
        except httpx.RequestError as error:
            raise _unreachable(self._url, request, error) from error


class AsyncRolloutClient:
    """`RolloutClient` for asyncio: the same calls, awaited; `leases` is an async iterator.

    Arguments as there; `transport` is an async one.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retry_for_s: float = RETRY_FOR_S,
        consumer: str | None = None,
        binary: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        import httpx

        self._url = _checked(url)
        self._core = Core(timeout_s=timeout_s, retry_for_s=retry_for_s, consumer=consumer, binary=binary)
        self._bars: list[Progress] = []
        self._owns_leases = True
        self._http = httpx.AsyncClient(
            base_url=self._url,
            transport=transport,
            verify=_uses_tls(self._url),
            headers=_Key.of(api_key).headers(),
            follow_redirects=False,
        )

    @classmethod
    def _sharing(cls, url: str, key: _Key, core: Core, bars: list[Progress]) -> Self:
        """A client that knows what another one does (versions posted, leases held), on connections of its own."""
        client = cls(url, api_key="")
        client._http.headers.update(key.headers())
        client._core, client._bars = core, bars
        client._owns_leases = False
        return client

    post_version = _awaited(Core.post_version)
    version = _awaited(Core.version)
    submit = _awaited(Core.submit)
    lease = _awaited(Core.lease)
    ack = _awaited(Core.ack)
    release = _awaited(Core.release)
    renew = _awaited(Core.renew)
    status = _awaited(Core.status)
    group = _awaited(Core.group)
    groups = _awaited(Core.groups)
    cancel = _awaited(Core.cancel)
    pause = _awaited(Core.pause)
    resume = _awaited(Core.resume)
    engines = _awaited(Core.engines)
    add_engine = _awaited(Core.add_engine)
    remove_engine = _awaited(Core.remove_engine)
    metrics = _awaited(Core.metrics)
    create_checkpoint = _awaited(Core.create_checkpoint)
    checkpoints = _awaited(Core.checkpoints)
    delete_checkpoint = _awaited(Core.delete_checkpoint)
    rewind = _awaited(Core.rewind)

    async def leases(
        self,
        max_groups: int = 8,
        min_groups: int = 1,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        progress: bool = False,
    ) -> AsyncIterator[Lease]:
        """As `RolloutClient.leases`. Python closes an abandoned async iterator late: `async with` the client, or
        `contextlib.aclosing` the iterator, for the groups in hand to be given back at once."""
        ask = _ask(max_groups, min_groups, wait_s, lease_s, consumer)
        with Progress(progress, self._bars) as bar:
            while True:
                bar.asked()
                lease = await self._next_lease(ask)
                if lease is None:
                    continue
                if lease.status is LeaseStatus.EXHAUSTED:
                    bar.exhausted()
                    return
                if not lease.groups:
                    continue
                self._core.hold(lease)
                bar.handed(lease)
                try:
                    yield lease
                except BaseException:
                    await self._run(self._core.give_back(lease.lease_id or ""))
                    raise
                bar.asked()
                try:
                    await self._run(self._core.finish(lease))
                except BaseException:
                    await self._run(loops.finish_late(self._core, lease))
                    raise

    async def _next_lease(self, ask: dict[str, Any]) -> Lease | None:
        request_id = str(uuid.uuid4())
        try:
            return await self._run(loops.next_lease(self._core, ask, request_id))
        except ClientError:
            raise
        except BaseException:  # a cancellation cut the call off; the lease may have been made all the same
            await self._run(self._core.recover(ask, request_id))
            raise

    def prefetch(
        self,
        max_groups: int = 8,
        min_groups: int = 1,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        depth: int = 1,
        progress: bool = False,
    ) -> AsyncPrefetch:
        """As `RolloutClient.prefetch`, in tasks of the running loop: `async with` it and `async for` over it."""
        from trainer_client.prefetch import AsyncPrefetch

        ask = _ask(max_groups, min_groups, wait_s, lease_s, consumer)
        return AsyncPrefetch(self, self._core, ask, depth, Progress(progress, self._bars))

    async def aclose(self) -> None:
        """Give back what loops still hold, and close the connections."""
        for lease_id in list(self._core.held) if self._owns_leases else ():
            await self._run(self._core.give_back(lease_id))
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, flow: Flow[T]) -> T:
        import asyncio

        try:
            todo = next(flow)
            while True:
                if isinstance(todo, Pause):
                    await asyncio.sleep(todo.seconds)
                    todo = flow.send(None)
                    continue
                try:
                    response = await self._perform(todo)
                except ServiceUnreachable as error:
                    todo = flow.throw(error)
                else:
                    if response.status < 400:
                        for bar in tuple(self._bars):
                            bar.answered(todo)
                    todo = flow.send(response)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    async def _perform(self, request: Request) -> Response:
        import httpx

        try:
            async with self._http.stream(**_arguments(request)) as answer:
                return _response(answer, [chunk async for chunk in answer.aiter_bytes()])
        except httpx.RequestError as error:
            raise _unreachable(self._url, request, error) from error


def _ask(max_groups: int, min_groups: int, wait_s: int, lease_s: int, consumer: str | None) -> dict[str, Any]:
    """What the lease calls of one loop have in common."""
    return {
        "max_groups": max_groups,
        "min_groups": min_groups,
        "wait_s": wait_s,
        "lease_s": lease_s,
        "consumer": consumer,
    }


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the service's url is http://host:port, not {url!r}")
    return url.rstrip("/")


def _uses_tls(url: str) -> bool:
    """Whether to load the authorities' certificates, which cost most of a client's start and are of no use to http."""
    return url.startswith("https:")


class _Key:
    """An API key that no repr shows, not that of what holds it either."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    @classmethod
    def of(cls, api_key: str | None) -> Self:
        """The given one, or the environment's. ValueError, which does not repeat it, where it can be none."""
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        key = key.strip()  # a line of a file ends with a line break
        if not (key.isascii() and key.isprintable()) or " " in key:
            name = f"{KEY_VARIABLE} in the environment" if api_key is None else "api_key"
            raise ValueError(f"{name} is no API key: expected one line of printable ASCII without spaces")
        return cls(key)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}


def _arguments(request: Request) -> dict[str, Any]:
    """What both kinds of httpx client take."""
    headers = {"content-type": "application/json"} if request.body is not None else {}
    if request.accept is not None:
        headers["accept"] = request.accept
    return {
        "method": request.method,
        "url": request.path,
        "content": request.body,
        "headers": headers,
        "timeout": request.timeout_s,
    }


def _response(answer: httpx.Response, chunks: Iterable[bytes]) -> Response:
    return Response(
        status=answer.status_code,
        content=bytearray().join(chunks),  # writable, and so are the arrays of a binary lease: torch asks for that
        retry_after=answer.headers.get("retry-after"),
        content_type=answer.headers.get("content-type", ""),
    )


def _unreachable(url: str, request: Request, error: httpx.RequestError) -> ServiceUnreachable:
    import httpx

    never_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    said = str(error) or "no answer in time"
    return ServiceUnreachable(
        f"{request.method} {url}{request.path}: {type(error).__name__}: {said}", sent=not never_sent
    )
