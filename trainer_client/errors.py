"""What can go wrong for a trainer, told apart by whose fault it is.

    ClientError
    ├── ServiceUnreachable     no answer: connection refused, cut, or timed out; tried again for `retry_for_s` first
    ├── UnexpectedAnswer       an answer that is not the service's: another server on that address, another interface
    └── Problem                the service said no (RFC 9457)
        ├── InvalidRequest     400, 413, 422 …  the call itself is wrong; trying again cannot help
        ├── Denied             this caller may not
        │   ├── Unauthorized       401  no API key was given, or one the service does not know
        │   └── Forbidden          403  the key's role, or a path or engine address outside the service's allow-lists
        ├── NotFound           404  no such group, lease, checkpoint
        ├── Conflict           409  the call contradicts what is already so; nothing of it was done
        ├── QueueFull          429  a bounded queue stayed full for `retry_for_s`; `retry_after_s`
        ├── EnginesBehind      502  engines did not load the weights; the version was not posted; `engines`
        └── Unavailable        502, 503, 504
            ├── Halted             the service stopped dispatching; `group_id`, `engine` and `error` say over what
            ├── StoreUnavailable   the store cannot commit; nothing was acknowledged
            └── ShuttingDown       the service is ending

`Halted` is never retried: nothing will come until somebody has looked and posted `/resume`; nor is `Denied`. No error
holds the key. Every error survives pickling, so that one raised in a data loader's process arrives whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClientError(Exception):
    """Base of everything `trainer_client` raises on purpose."""


class ServiceUnreachable(ClientError):
    """No answer came. `sent` is False where the request certainly never reached the service."""

    def __init__(self, detail: str, *, sent: bool = True) -> None:
        super().__init__(detail)
        self.sent = sent


class UnexpectedAnswer(ClientError):
    """The answer is not what this interface gives."""


class Problem(ClientError):
    """The service refused. `str(error)` is the detail; `type` its stable slug; `facts` its further members."""

    def __init__(
        self,
        detail: str,
        *,
        type: str = "about:blank",  # the name RFC 9457 gives this member
        status: int = 0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.type = type
        self.status = status
        self.facts: dict[str, Any] = dict(facts or {})
        self.repeated = False
        """True: an earlier try of this call got no answer and may have been acted on."""


class InvalidRequest(Problem):
    """The call itself is wrong (400, 413, 422 and other 4xx)."""


class Denied(Problem):
    """This caller may not do this (401, 403)."""


class Unauthorized(Denied):
    """The call needs an API key: none was given, or one the service does not know (401).

    Give the client one (`api_key`, or the variable ROLLOUT_SERVICE_KEY); `rollout-service key create` makes it.
    """


class Forbidden(Denied):
    """The key is known, but its role does not allow this call; or what was asked for lies outside the service's
    configuration (`weights.allowed_paths`, `registration.allowed`) (403)."""


class NotFound(Problem):
    """There is no such thing (404)."""


class Conflict(Problem):
    """The call contradicts what is already so; nothing of it was done (409)."""


class QueueFull(Problem):
    """A bounded queue is full; nothing was taken (429)."""

    retry_after_s: float | None = None
    """What the service asked for, in seconds; None where it did not say."""


class EnginesBehind(Problem):
    """Not every engine loaded the weights; the version was not posted (502).

    Those that did not get no more work, so the same call again goes on without them.
    """

    @property
    def engines(self) -> list[dict[str, Any]]:
        """`id`, `url` and `error` of each."""
        found = self.facts.get("engines")
        return [engine for engine in found if isinstance(engine, dict)] if isinstance(found, list) else []


class Unavailable(Problem):
    """The service, or what stands before it, cannot do this now (502, 503, 504)."""


class Halted(Unavailable):
    """The service stopped dispatching because too much went wrong in a row; the message carries the last error."""

    @property
    def group_id(self) -> str | None:
        """The group it halted over."""
        return _text(self.facts.get("group_id"))

    @property
    def engine(self) -> str | None:
        """The engine that failed last."""
        return _text(self.facts.get("engine"))

    @property
    def error(self) -> str | None:
        """The engine's own message."""
        return _text(self.facts.get("error"))


class StoreUnavailable(Unavailable):
    """The store cannot commit; nothing was acknowledged."""


class ShuttingDown(Unavailable):
    """The service is ending."""


def _text(value: object) -> str | None:
    return None if value is None else str(value)


_BY_TYPE: dict[str, type[Problem]] = {
    "engines-behind": EnginesBehind,
    "halted": Halted,
    "store-unavailable": StoreUnavailable,
    "shutting-down": ShuttingDown,
}
_BY_STATUS: dict[int, type[Problem]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    429: QueueFull,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
}


def problem(status: int, body: Mapping[str, Any]) -> Problem:
    """The error for a problem document; `body` may lack any member (a proxy's answer has none)."""
    slug = str(body.get("type") or "about:blank").rstrip("/")
    slug = slug if slug == "about:blank" else slug.replace("#", "/").replace(":", "/").rpartition("/")[2]
    detail = str(body.get("detail") or body.get("title") or f"HTTP {status}")
    facts = {key: value for key, value in body.items() if key not in ("type", "title", "status", "detail", "instance")}
    kind = _BY_TYPE.get(slug) or _BY_STATUS.get(status) or (InvalidRequest if status < 500 else Problem)
    if kind is Halted:
        # The halt's facts stand beside the detail or, as in GET /status, under "halted".
        nested = facts.get("halted")
        facts |= nested if isinstance(nested, dict) else {}
        missing = [f"{key}: {facts[key]}" for key in ("error", "group_id", "engine") if facts.get(key)]
        detail = "; ".join([detail, *(part for part in missing if part.partition(": ")[2] not in detail)])
    elif kind is Unauthorized:
        detail += "; RolloutClient takes a key as api_key=…, or from the environment variable ROLLOUT_SERVICE_KEY"
    return kind(detail, type=slug, status=status, facts=facts)
