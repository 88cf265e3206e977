"""Every call written once, without I/O: a generator yields what to do (`Request`, `Pause`) and gets the `Response`.

A driver performs the requests, throws `ServiceUnreachable` in when no answer came, and returns what the generator
returns. What always holds here:

- A call is repeated only when repeating it is harmless: it is idempotent at the service, or the first try certainly
  never got there. To be repeatable, a lease carries a `request_id` and every prompt a `prompt_id`.
- The budget `retry_for_s` runs from a call's first failure, so a long poll that breaks late still has all of it.
- `Halted` is never retried.
"""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from trainer_client.binary import ACCEPT, MEDIA_TYPE, decode_lease
from trainer_client.errors import (
    ClientError,
    Conflict,
    Halted,
    NotFound,
    Problem,
    QueueFull,
    ServiceUnreachable,
    ShuttingDown,
    StoreUnavailable,
    Unavailable,
    UnexpectedAnswer,
    problem,
)
from trainer_client.types import (
    BumpResult,
    GroupInfo,
    GroupPage,
    Lease,
    Renewal,
    Status,
    SubmittedGroup,
    Version,
)

logger = logging.getLogger("trainer_client")

T = TypeVar("T")

LOAD_TIMEOUT_S = 600.0
"""The service's own default for one engine; they load side by side."""
FIRST_CONTACT_S = 70.0
"""The service asks a new engine what it is; a vLLM server may take a minute to say so the first time."""
FIRST_BACKOFF_S = 0.1
"""Short, so that a dropped connection costs a step next to nothing."""
LONGEST_BACKOFF_S = 2.0
"""A restarted service is found again within two seconds."""
GIVE_BACK_FOR_S = 5.0
"""How long giving a lease back is tried while an exception is on its way; the lease's expiry does the rest."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request; `timeout_s` bounds each wait for the socket."""

    method: str
    path: str
    """With its query, below the client's URL."""
    body: bytes | None = None
    timeout_s: float
    idempotent: bool = True
    accept: str | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What came back."""

    status: int
    content: bytes | bytearray
    retry_after: str | None = None
    content_type: str = ""


class Pause(msgspec.Struct, frozen=True):
    """Wait so many seconds."""

    seconds: float


Flow = Generator[Request | Pause, Response | None, T]
"""Yields what to do, gets the response of a request (None for a pause), returns T."""


class Core:
    """The calls, and the little a client remembers between them."""

    def __init__(
        self,
        *,
        timeout_s: float,
        retry_for_s: float,
        consumer: str | None,
        binary: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_s = timeout_s
        self.retry_for_s = retry_for_s
        self.consumer = consumer
        self.binary = binary
        self.clock = clock
        self.posted_version: int | None = None
        """The last version this client posted."""
        self.resets = 0
        """How often this client lowered the version: leases from before are void."""
        self.held: dict[str, frozenset[str]] = {}
        """Leases handed to a loop -> their groups neither acked nor released yet."""

    # policy version

    def post_version(
        self,
        version: int,
        reset: bool = False,
        *,
        weights: str | None = None,
        lora: tuple[str, str] | None = None,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> Flow[BumpResult]:
        """Tell the service that every engine has the weights of `version`, or have them loaded first.

        Equal to the current version: no effect. Lower: `Conflict`, unless `reset`, which voids every lease and has
        every opened group generated again.

        `weights`: folder every engine is to load before; `lora`: (name, folder) of an adapter. Folders are as the
        engines see them, within the service's `weights.allowed_paths` (else `Denied`). `EnginesBehind`: not every
        engine followed, and the version was not posted; the same call again goes on with those that did.
        `load_timeout_s`: longest wait for the engines.
        """
        body: dict[str, Any] = {"version": version, "reset": reset}
        if weights is not None:
            body["weights"] = {"path": weights}
        if lora is not None:
            body["lora"] = {"name": lora[0], "path": lora[1]}
        timeout_s = self.timeout_s + (load_timeout_s if weights is not None or lora is not None else 0.0)
        answer = yield from self._call("POST", "/policy_version", _json(body), timeout_s=timeout_s)
        result = _decode(answer, BumpResult)
        self.posted_version = result.version
        if result.version < result.previous:
            self.resets += 1
        return result

    def version(self) -> Flow[Version]:
        """The current policy version and `max_staleness`."""
        return _decode((yield from self._call("GET", "/policy_version")), Version)

    # prompts

    def submit(self, prompts: Sequence[Mapping[str, Any]], final: bool = False) -> Flow[list[SubmittedGroup]]:
        """Submit prompts, all or none; the answer is in their order.

        Each is a mapping with `messages`, `prompt` or `prompt_token_ids`, and optionally `prompt_id`, `epoch`,
        `columns`, `num_generations`, `sampling`. A prompt without `prompt_id` gets a random one, so that a repeated
        call does not submit it twice. `final` says that no more will come. A full queue is waited for up to
        `retry_for_s`, then `QueueFull`. NaN and infinity are refused (ValueError): they are not JSON.
        """
        rows = [{"prompt_id": str(uuid.uuid4()), **prompt} for prompt in prompts]
        body: dict[str, Any] = {"prompts": rows} | ({"final": True} if final else {})
        answer = yield from self._call("POST", "/prompts", _json(body))
        return _decode(answer, _Submitted).groups

    # leases

    def lease(
        self,
        max_groups: int = 8,
        min_groups: int = 1,
        wait_s: int = 30,
        lease_s: int = 600,
        consumer: str | None = None,
        request_id: str | None = None,
    ) -> Flow[Lease]:
        """Lease between `min_groups` and `max_groups` scored groups, waiting up to `wait_s` seconds for them.

        A lost answer is asked for again under the same `request_id` (random where not given) and comes back with the
        same groups. Data-parallel ranks that pass one `request_id` share one lease. Raises `Halted`.
        """
        body: dict[str, Any] = {
            "max_groups": max_groups,
            "min_groups": min_groups,
            "wait_s": wait_s,
            "lease_s": lease_s,
            "request_id": request_id or str(uuid.uuid4()),
        }
        if name := consumer or self.consumer:
            body["consumer"] = name
        answer = yield from self._call(
            "POST", "/leases", _json(body), timeout_s=wait_s + self.timeout_s, accept=ACCEPT if self.binary else None
        )
        if answer.content_type.partition(";")[0].strip().lower() == MEDIA_TYPE:
            return decode_lease(answer.content)
        return _decode(answer, Lease)

    def ack(self, lease: Lease | str, group_ids: Sequence[str] | None = None) -> Flow[None]:
        """The groups are trained (all of the lease, or those named): they are never delivered again.

        `Conflict`: one of them belongs to somebody else by now (the lease ran out, or a reset came); then nothing of
        the call is done. An empty lease needs no ack and takes none.
        """
        yield from self._settle(lease, "ack", group_ids)

    def release(self, lease: Lease | str, group_ids: Sequence[str] | None = None) -> Flow[None]:
        """Give groups back (all of the lease, or those named): they are ready again, or stale."""
        try:
            yield from self._settle(lease, "release", group_ids)
        except (Conflict, NotFound) as error:
            if not error.repeated:
                raise
            # The first try did it and its answer was lost: what was to be given back is no longer ours.
            self._forget(lease, group_ids)

    def renew(self, lease: Lease | str) -> Flow[Renewal]:
        """Extend a lease by its `lease_s` from now. `Conflict` or `NotFound`: it is lost."""
        if (lease_id := _lease_id(lease)) is None:
            return Renewal()
        return _decode((yield from self._call("POST", f"/leases/{_path(lease_id)}/renew", b"{}")), Renewal)

    def _settle(self, lease: Lease | str, verb: str, group_ids: Sequence[str] | None) -> Flow[None]:
        if (lease_id := _lease_id(lease)) is None or (group_ids is not None and not group_ids):
            return
        body = _json({} if group_ids is None else {"group_ids": list(group_ids)})
        yield from self._call("POST", f"/leases/{_path(lease_id)}/{verb}", body)
        self._forget(lease, group_ids)

    # what loops over leases are made of

    def hold(self, lease: Lease) -> None:
        """From here on the groups of this lease are a loop's to ack or give back."""
        if lease.lease_id is not None:
            self.held[lease.lease_id] = frozenset(group.group_id for group in lease.groups)

    def _forget(self, lease: Lease | str, group_ids: Sequence[str] | None) -> None:
        lease_id = _lease_id(lease)
        left = self.held.get(lease_id or "", frozenset()) - frozenset(group_ids or ())
        if group_ids is None or not left:
            self.held.pop(lease_id or "", None)
        else:
            self.held[lease_id or ""] = left

    def finish(self, lease: Lease) -> Flow[None]:
        """Ack what is left of a held lease.

        Where the lease was lost (it ran out, a reset came) the groups that are still ours are acked one by one, and
        the others are named in a warning: they will be delivered again, or were generated again.
        """
        lease_id = lease.lease_id or ""
        left = self.held.get(lease_id, frozenset())
        # Named one by one even where it is all of them: what was released meanwhile must not be acked.
        ids = [group.group_id for group in lease.groups if group.group_id in left]
        try:
            yield from self.ack(lease, ids)
            return
        except Conflict as error:
            reason = error
        lost = []
        for group_id in ids:
            try:
                yield from self.ack(lease, [group_id])
            except Conflict as error:
                lost.append(group_id)
                reason = error
        self.held.pop(lease_id, None)
        if lost:
            names = ", ".join(lost)
            logger.warning("lease %s was lost before its ack; trained, but not ours: %s (%s)", lease_id, names, reason)

    def give_back(self, lease_id: str) -> Flow[None]:
        """Release what is left of a held lease. Never raises a `ClientError`: one may be on its way already."""
        if not (left := self.held.get(lease_id)):
            return
        try:
            yield from self._brief().release(lease_id, sorted(left))
        except (Conflict, NotFound) as error:
            logger.info("lease %s was no longer ours to give back: %s", lease_id, error)
        except ClientError as error:
            logger.warning("lease %s could not be given back and will run out by itself: %s", lease_id, error)
        finally:
            self.held.pop(lease_id, None)

    def recover(self, ask: Mapping[str, Any], request_id: str) -> Flow[None]:
        """Give back the lease of a call that was cut off: if there is one, only its request id leads to it."""
        brief = self._brief()
        try:
            try:
                lease = yield from brief.lease(**{**ask, "wait_s": 0}, request_id=request_id)
            except (
                Conflict
            ):  # another wait_s may count as another call; then there is a lease, and asking alike gets it
                lease = yield from brief.lease(**ask, request_id=request_id)
            yield from brief.release(lease)
        except ClientError as error:
            logger.warning("the last lease asked for, if one was made, will run out by itself: %s", error)

    def _brief(self) -> Core:
        """The same calls with little patience, for the way out."""
        patience = min(self.retry_for_s, GIVE_BACK_FOR_S)
        return Core(
            timeout_s=GIVE_BACK_FOR_S,
            retry_for_s=patience,
            consumer=self.consumer,
            binary=self.binary,
            clock=self.clock,
        )

    # looking in, and steering

    def status(self) -> Flow[Status]:
        """Counts, slots, halt, engines."""
        return _decode((yield from self._call("GET", "/status")), Status)

    def group(self, group_id: str) -> Flow[GroupInfo]:
        """One group in any state."""
        facts = _decode((yield from self._call("GET", f"/groups/{_path(group_id)}")), dict[str, Any])
        return _group_info(facts)

    def groups(self, state: str | None = None, limit: int = 100, after: str | None = None) -> Flow[GroupPage]:
        """A page of groups; go on with `after=page.next_after` until that is None."""
        query = {"state": state, "limit": limit, "after": after}
        encoded = urlencode({key: value for key, value in query.items() if value is not None})
        rows = _rows((yield from self._call("GET", f"/groups?{encoded}")), "groups")
        groups = [_group_info(row) for row in rows]
        return GroupPage(groups=groups, next_after=groups[-1].group_id if 0 < limit <= len(groups) else None)

    def cancel(self, group_id: str) -> Flow[None]:
        """Drop an outstanding group (reason `cancelled`)."""
        try:
            yield from self._call("DELETE", f"/groups/{_path(group_id)}")
        except Conflict as error:
            # The first try may have done it, its answer lost; a group that ended in another way is a conflict.
            if not error.repeated or (yield from self.group(group_id)).state != "dropped":
                raise

    def pause(self) -> Flow[None]:
        """Stop dispatching; what is in flight, scoring and leases go on."""
        yield from self._call("POST", "/pause")

    def resume(self) -> Flow[None]:
        """Dispatch again; clears a pause and a halt."""
        yield from self._call("POST", "/resume")

    def engines(self) -> Flow[list[dict[str, Any]]]:
        """The fleet: health, load, in flight."""
        return _rows((yield from self._call("GET", "/engines")), "engines")

    def add_engine(self, url: str, max_inflight: int | Literal["auto"] | None = None) -> Flow[dict[str, Any]]:
        """Add an engine until the service's next restart; its description, as in `engines`.

        `max_inflight`: requests at once, or "auto": as many as it takes without a queue, 1024 at most. One that is
        there already takes it, where given; one that does not answer yet is added with `healthy` false and used as
        soon as it answers. `Forbidden`: outside the service's `registration.allowed`; `Conflict`: what answers there is
        wrong for the run, or there are too many.
        """
        body = {"url": url} | ({} if max_inflight is None else {"max_inflight": max_inflight})
        timeout_s = self.timeout_s + FIRST_CONTACT_S
        answer = yield from self._call("POST", "/engines", _json(body), timeout_s=timeout_s)
        return _decode(answer, dict[str, Any])

    def remove_engine(self, id: str, drain_s: int = 30) -> Flow[dict[str, Any] | None]:
        """Remove an engine, and its last description when it is gone; None where a repeated call finds it gone.

        It gets no new work from now on; what runs there may finish for `drain_s` seconds (0 to 3600), and is then
        aborted and goes to another engine. `NotFound`: there is none of this id.
        """
        path = f"/engines/{_path(id)}?{urlencode({'drain_s': drain_s})}"
        try:
            answer = yield from self._call("DELETE", path, timeout_s=drain_s + self.timeout_s)
        except NotFound as error:
            if not error.repeated:
                raise
            return None
        return _decode(answer, dict[str, Any])

    def metrics(self) -> Flow[str]:
        """The Prometheus page."""
        return (yield from self._call("GET", "/metrics")).content.decode()

    # checkpoints

    def create_checkpoint(self, name: str) -> Flow[dict[str, Any]]:
        """Mark this point: policy version, and what has ended."""
        try:
            return _decode((yield from self._call("POST", "/checkpoints", _json({"name": name}))), dict[str, Any])
        except Conflict as error:
            marks = (yield from self.checkpoints()) if error.repeated else []
            if mine := [mark for mark in marks if mark.get("name") == name]:
                return mine[0]
            raise

    def checkpoints(self) -> Flow[list[dict[str, Any]]]:
        """Every mark, oldest first."""
        return _rows((yield from self._call("GET", "/checkpoints")), "checkpoints")

    def delete_checkpoint(self, name: str) -> Flow[None]:
        """Forget a mark."""
        try:
            yield from self._call("DELETE", f"/checkpoints/{_path(name)}")
        except NotFound as error:
            if not error.repeated:
                raise

    def rewind(self, name: str) -> Flow[dict[str, Any]]:
        """Return to a mark: its policy version, and everything that has ended since pending again.

        Voids every lease. Not repeated once it may have been acted on: work done since would be undone again.
        """
        answer = yield from self._call("POST", "/rewind", _json({"name": name}), idempotent=False)
        self.resets += 1
        self.posted_version = None
        return _decode(answer, dict[str, Any])

    # one call

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout_s: float = 0.0,
        idempotent: bool = True,
        accept: str | None = None,
    ) -> Flow[Response]:
        request = Request(
            method=method,
            path=path,
            body=body,
            timeout_s=timeout_s or self.timeout_s,
            idempotent=idempotent,
            accept=accept,
        )
        deadline: float | None = None
        backoff, tries, maybe_done = FIRST_BACKOFF_S, 0, False
        while True:
            tries += 1
            error: ServiceUnreachable | Problem
            try:
                response = yield request
                if response is None:
                    raise RuntimeError("the driver gave no response to a request")
                if response.status < 400:
                    return response
                error = _problem(response)
                error.repeated = maybe_done
            except ServiceUnreachable as unreachable:
                error = unreachable
            now = self.clock()
            deadline = now + self.retry_for_s if deadline is None else deadline
            # Half to whole: ranks that lost the service together do not come back in one instant.
            wait = backoff * random.uniform(0.5, 1.0)  # noqa: S311  (spreads load, guards nothing)
            if isinstance(error, QueueFull) and error.retry_after_s is not None:
                wait = error.retry_after_s
            if not _worth_repeating(request, error) or now >= deadline:
                if tries > 1:
                    error.add_note(f"gave up after {tries} tries")
                raise error from None  # its text says what the client below met
            if tries == 1:
                logger.warning("%s; trying again for %g s", error, self.retry_for_s)
            maybe_done = maybe_done or _maybe_done(error)
            backoff = min(backoff * 2, LONGEST_BACKOFF_S)
            yield Pause(min(wait, deadline - now))


class _Submitted(msgspec.Struct):
    groups: list[SubmittedGroup]


def _worth_repeating(request: Request, error: ServiceUnreachable | Problem) -> bool:
    if isinstance(error, Halted):
        return False
    if isinstance(error, StoreUnavailable | ShuttingDown | QueueFull):
        return True  # the service says that nothing was done
    if isinstance(error, ServiceUnreachable | Unavailable):
        return request.idempotent or not _maybe_done(error)
    return False


def _maybe_done(error: ServiceUnreachable | Problem) -> bool:
    """Whether the failed try may have been acted on."""
    if isinstance(error, ServiceUnreachable):
        return error.sent
    return isinstance(error, Unavailable) and not isinstance(error, StoreUnavailable | ShuttingDown)


def _problem(response: Response) -> Problem:
    try:
        body = msgspec.json.decode(response.content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):  # not the service's own: a proxy, or another server
        body = {"detail": response.content[:200].decode(errors="replace").strip() or None}
    error = problem(response.status, body)
    if isinstance(error, QueueFull) and response.retry_after:
        try:
            error.retry_after_s = max(0.0, float(response.retry_after))
        except ValueError:  # an HTTP date: wait as after any failure
            error.retry_after_s = None
    return error


def _decode(response: Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start = response.content[:80].decode(errors="replace")
        raise UnexpectedAnswer(
            f"HTTP {response.status} is no answer of a rollout-service: {error}: {start!r}"
        ) from error


def _rows(response: Response, name: str) -> list[dict[str, Any]]:
    """A list of objects, alone or as the member `name`."""
    answer = _decode(response, dict[str, Any] | list[dict[str, Any]])  # type: ignore[arg-type]  # msgspec takes unions
    rows = answer[name] if isinstance(answer, dict) and name in answer else answer
    if not isinstance(rows, list):
        raise UnexpectedAnswer(f"no list of {name} in the answer")
    return rows


def _group_info(facts: dict[str, Any]) -> GroupInfo:
    try:
        return msgspec.convert({**facts, "facts": facts}, GroupInfo)
    except msgspec.ValidationError as error:
        raise UnexpectedAnswer(f"a group of another shape: {error}") from error


def _json(value: Any) -> bytes:
    """Strict JSON. numpy and torch values go as the plain values they hold."""
    return json.dumps(value, allow_nan=False, default=_plain, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _lease_id(lease: Lease | str) -> str | None:
    return lease if isinstance(lease, str) else lease.lease_id


def _path(part: str) -> str:
    return quote(part, safe="")
