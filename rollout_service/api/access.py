"""Who may call what: ONE table, and the decision.

What always holds: a route that stands in no line of the table cannot be built; where keys are configured, a path that
is no route needs one too; the decision is made before anything of the request's body is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import structlog

from rollout_service.errors import BadRequest, Forbidden, Unauthorized
from rollout_service.keys import MAX_KEY_CHARACTERS, KeyEntry, Keys, Role
from rollout_service.settings.server import HOST_NAME, is_loopback

EVERYBODY = None
"""Needs no key: what probes, browsers and tools ask for before they can have one. Holds nothing of the run."""

LOOKING = frozenset({Role.ADMIN, Role.TRAINER, Role.READ})
TRAINING = frozenset({Role.ADMIN, Role.TRAINER})
SUBMITTING = frozenset({Role.ADMIN, Role.TRAINER, Role.SUBMIT})
OPERATING = frozenset({Role.ADMIN})
ANY_KEY = frozenset(Role)
"""Of a path that is no route: whoever has a key is told so."""

ACCESS: Mapping[str, frozenset[Role] | None] = {
    "GET /": EVERYBODY,
    "GET /page/{name}": EVERYBODY,
    "GET /livez": EVERYBODY,
    "GET /readyz": EVERYBODY,  # without a key that may look: no details
    "GET /openapi.json": EVERYBODY,
    "HEAD /openapi.json": EVERYBODY,
    "GET /status": LOOKING,
    "GET /live": LOOKING,
    "GET /events": LOOKING,
    "GET /metrics": LOOKING,
    "GET /engines": LOOKING,
    "GET /groups": LOOKING,
    "GET /groups/{group_id}": LOOKING,
    "GET /groups/{group_id}/samples": LOOKING,
    "GET /policy_version": LOOKING,
    "GET /checkpoints": LOOKING,
    "POST /prompts": SUBMITTING,
    "POST /policy_version": TRAINING,
    "POST /leases": TRAINING,
    "POST /leases/{lease_id}/ack": TRAINING,
    "POST /leases/{lease_id}/release": TRAINING,
    "POST /leases/{lease_id}/renew": TRAINING,
    "POST /checkpoints": TRAINING,
    "DELETE /checkpoints/{name}": TRAINING,
    "POST /rewind": TRAINING,
    "DELETE /groups/{group_id}": OPERATING,
    "POST /pause": OPERATING,
    "POST /resume": OPERATING,
    "POST /engines": OPERATING,
    "DELETE /engines/{engine_id}": OPERATING,
}
"""Method and template of every route → the roles that may call it."""

WATCHED = frozenset({"POST /rewind", "DELETE /checkpoints/{name}"})
"""Beside what operators do, calls that somebody may ask about later: who was it?"""

BROWSERS_SEND = frozenset({b"origin", b"referer", b"accept-language", b"sec-fetch-site"})
"""A page cannot keep its browser from sending all of these; curl and HTTP libraries send none."""

READ_HEADERS = (b"host", b"authorization", b"origin", b"referer", b"sec-fetch-site")

log = structlog.get_logger(__name__)

_HOST = re.compile(rf"({HOST_NAME.pattern})(?::([0-9]{{1,5}}))?", re.ASCII)


def undecided(routes: Iterable[str]) -> list[str]:
    """Those of `routes` ("GET /status") that stand in no line of the table."""
    return sorted(route for route in routes if route not in ACCESS)


class Access:
    """The decision about one call."""

    def __init__(self, keys: Keys, *, allowed_hosts: Iterable[str] = (), any_host: bool = False) -> None:
        """`any_host`: whoever reaches the address may call it by any name (`server.insecure`)."""
        self._keys = keys
        self._hosts = frozenset(allowed_hosts)
        self._any_host = any_host

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return self._keys.required

    def knows(self, caller: KeyEntry | None) -> bool:
        """Whether who was let in once would be let in now."""
        return not self._keys.required if caller is None else caller in self._keys.ring.entries

    def decide(self, route: str, headers: Iterable[tuple[bytes, bytes]]) -> KeyEntry | None:
        """Whose key it is; None where the call needs none. `route`: method and template, "" where there is no route.

        Raises BadRequest for headers that are not HTTP, Unauthorized, Forbidden.
        """
        found: dict[bytes, list[str]] = {name: [] for name in READ_HEADERS}
        from_browser = False
        for name, value in headers:
            if name in found:
                found[name].append(value.decode("latin-1"))
            from_browser |= name in BROWSERS_SEND
        host = _host(found[b"host"])
        if not self._keys.required:
            if from_browser:
                self._check_browser(host, found[b"origin"])
                if ACCESS.get(route) is not EVERYBODY:
                    self._check_site(host, found[b"referer"], found[b"sec-fetch-site"])
            return None
        allowed = ACCESS[route] if route else ANY_KEY
        entry = self._key(found[b"authorization"])
        if allowed is EVERYBODY:
            return entry
        if entry is None:
            if found[b"authorization"]:
                raise Unauthorized("the API key is not known here; expected Authorization: Bearer rsk_…")
            raise Unauthorized("this call needs an API key: Authorization: Bearer rsk_…")
        if entry.role not in allowed:
            needed = " or ".join(sorted(allowed))
            raise Forbidden(f"a key of role {entry.role} may not call {route}; it takes one of role {needed}")
        if allowed is OPERATING or route in WATCHED:
            log.info("operator_call", route=route, caller=entry.name)
        return entry

    def _key(self, given: list[str]) -> KeyEntry | None:
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not 0 < len(key) <= MAX_KEY_CHARACTERS:
            return None
        return self._keys.ring.find(key)

    def _check_browser(self, host: tuple[str, str] | None, origins: list[str]) -> None:
        """Without keys the address itself is the lock, and a browser on this machine stands behind it: a page from
        elsewhere may neither call us (Origin) nor have its own name point here (Host)."""
        if not self._any_host and host is not None:
            name = host[0]
            if not (is_loopback(name.strip("[]")) or name in self._hosts):
                raise Forbidden(
                    f"called by the name {name!r}: without API keys only loopback names and server.allowed_hosts are "
                    "answered to",
                )
        for origin in origins:
            if host is None or _origin(origin) != host:
                raise Forbidden("called by a page of another origin; without API keys that is not answered")

    def _check_site(self, host: tuple[str, str] | None, referers: list[str], sites: list[str]) -> None:
        """A page from elsewhere may lead a person here, and no more: its images and scripts load nothing of ours."""
        foreign = any(host is None or _origin(referer) != host for referer in referers)
        if foreign or not set(sites) <= {"same-origin", "none"}:
            raise Forbidden("called by a page of another site; without API keys that is not answered")


def _host(given: list[str]) -> tuple[str, str] | None:
    """(name, port) of the Host header; None where an HTTP/1.0 caller sent none."""
    if not given:
        return None
    match = _HOST.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise BadRequest("the Host header is no host")
    return match[1].lower(), match[2] or ""


def _origin(value: str) -> tuple[str, str] | None:
    try:
        parts = urlsplit(value)
        name, port = parts.hostname, parts.port
    except ValueError:
        return None
    if not name:
        return None
    return (f"[{name}]" if ":" in name else name), str(port) if port is not None else ""
