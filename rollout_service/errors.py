"""The one tree of errors a person or a program outside can meet.

    RolloutServiceError
    ├── ConfigError            the configuration or what it names is wrong; refused at start, exit 2
    ├── BadRequest             400  the body is not what HTTP or JSON allow
    │   ├── InvalidField       422  well-formed, but a field has no legal value
    │   ├── BodyTooLarge       413
    │   └── BodyTooSlow        408  the body did not come in time
    ├── Unauthorized           401  no key, or one that is unknown
    ├── Forbidden              403  the key's role does not allow the call, or a browser made it for another page
    ├── PathNotAllowed         403  a path outside weights.allowed_paths
    ├── EngineNotAllowed       403  an address outside registration.allowed
    ├── NotFound               404  no such group, lease, engine
    ├── Conflict               409  the call contradicts what is already so; nothing was done
    │   └── EngineRefused      409  what answers at the address is no engine for this run; says why
    ├── QueueFull              429  a bounded queue is full; `retry_after_s`
    │   └── TooManyViewers     429  the live view is watched by as many as it takes
    ├── EnginesBehind          502  engines did not load new weights; `engines` names them, no version was posted
    └── Unavailable            503
        ├── Halted             503  too many groups went wrong in a row; carries the group, the engine, its message
        ├── StoreUnavailable   503  the store cannot commit
        └── ShuttingDown       503

Each error knows the slug of its problem type and its status; `str(error)` is the detail a person can act on, and
`facts` are further members of the RFC 9457 problem document.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RolloutServiceError(Exception):
    """Base of everything this service refuses on purpose."""

    type: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"
    status: ClassVar[int] = 500

    def __init__(self, detail: str, **facts: Any) -> None:
        super().__init__(detail)
        self.facts = facts


class ConfigError(RolloutServiceError):
    """The configuration, or something it names, is wrong. One line: what, and where."""

    type = "config"
    title = "Bad configuration"
    status = 500


class BadRequest(RolloutServiceError):
    """The request is not what HTTP or JSON allow."""

    type = "bad-request"
    title = "Bad request"
    status = 400


class InvalidField(BadRequest):
    """The request is well-formed, but a field has no legal value."""

    type = "invalid-field"
    title = "Invalid field"
    status = 422


class BodyTooLarge(BadRequest):
    """The request body is larger than the service takes."""

    type = "body-too-large"
    title = "Body too large"
    status = 413


class BodyTooSlow(BadRequest):
    """The request body did not come in time."""

    type = "body-too-slow"
    title = "Body too slow"
    status = 408


class Unauthorized(RolloutServiceError):
    """The call needs an API key and has none that is known."""

    type = "unauthorized"
    title = "Unauthorized"
    status = 401


class Forbidden(RolloutServiceError):
    """Whoever calls is known, and may not call this."""

    type = "forbidden"
    title = "Forbidden"
    status = 403


class PathNotAllowed(RolloutServiceError):
    """The configuration does not let engines load from there."""

    type = "path-not-allowed"
    title = "Path not allowed"
    status = 403


class EngineNotAllowed(RolloutServiceError):
    """The configuration does not let an engine be added at this address."""

    type = "engine-not-allowed"
    title = "Engine not allowed"
    status = 403


class NotFound(RolloutServiceError):
    """There is no such thing."""

    type = "not-found"
    title = "Not found"
    status = 404


class Conflict(RolloutServiceError):
    """The call contradicts what is already so; nothing of it was done."""

    type = "conflict"
    title = "Conflict"
    status = 409


class EngineRefused(Conflict):
    """What answers there is wrong for this run (another model, raw logprobs, no vLLM); it was not added."""

    type = "engine-refused"
    title = "Engine refused"


class QueueFull(RolloutServiceError):
    """A bounded queue is full; nothing was taken."""

    type = "queue-full"
    title = "Queue full"
    status = 429

    def __init__(self, detail: str, *, retry_after_s: int = 1, **facts: Any) -> None:
        super().__init__(detail, **facts)
        self.retry_after_s = retry_after_s


class TooManyViewers(QueueFull):
    """The live view is watched by as many as it takes."""

    type = "too-many-viewers"
    title = "Too many viewers"


class EnginesBehind(RolloutServiceError):
    """Engines did not follow an update of the weights; they get no work, and the version stays as it was."""

    type = "engines-behind"
    title = "Engines behind"
    status = 502


class Unavailable(RolloutServiceError):
    """The service cannot do this now."""

    type = "unavailable"
    title = "Unavailable"
    status = 503


class Halted(Unavailable):
    """Too many groups went wrong in a row; nothing is ready. `POST /resume` clears it."""

    type = "halted"
    title = "Halted"


class StoreUnavailable(Unavailable):
    """The store cannot commit; nothing was acknowledged."""

    type = "store-unavailable"
    title = "Store unavailable"


class BatchRefused(StoreUnavailable):
    """What was to be written breaks a rule of the store: a fault of ours, and trying again would not help."""


class ShuttingDown(Unavailable):
    """The service is ending."""

    type = "shutting-down"
    title = "Shutting down"
