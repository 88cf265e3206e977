"""Who may call what: every route, every role, whatever the headers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route
from structlog.testing import capture_logs

from rollout_service.api.access import ACCESS, EVERYBODY, undecided
from rollout_service.core.changes import Halt
from rollout_service.errors import ConfigError
from rollout_service.keys import KeyEntry, KeyRing, Keys, Role, hash_of, key_table, new_key
from tests.api.conftest import Service
from tests.fakes import Runner, finished, until

SECRET = {role: new_key() for role in Role}
ENTRIES = [KeyEntry(name=role.value, role=role, hash=hash_of(key)) for role, key in SECRET.items()]

OPEN = {"GET /", "GET /page/{name}", "GET /livez", "GET /readyz", "GET /openapi.json", "HEAD /openapi.json"}
SUBMIT = {"POST /prompts"}
LOOK = {
    "GET /status",
    "GET /live",
    "GET /events",
    "GET /metrics",
    "GET /engines",
    "GET /groups",
    "GET /groups/{group_id}",
    "GET /groups/{group_id}/samples",
    "GET /policy_version",
    "GET /checkpoints",
}
TRAIN = {
    "POST /prompts",
    "POST /policy_version",
    "POST /leases",
    "POST /leases/{lease_id}/ack",
    "POST /leases/{lease_id}/release",
    "POST /leases/{lease_id}/renew",
    "POST /checkpoints",
    "DELETE /checkpoints/{name}",
    "POST /rewind",
}
MAY: dict[Role | None, set[str]] = {
    None: OPEN,
    Role.SUBMIT: OPEN | SUBMIT,
    Role.READ: OPEN | LOOK,
    Role.TRAINER: OPEN | LOOK | TRAIN,
}
"""Written out, not derived: a change of the table is a change here, too. Admins may call everything."""


def locked() -> Service:
    return Service(keys=Keys(ENTRIES))


def routes(service: Service) -> list[tuple[str, str]]:
    """(method, template) of everything the application answers, FastAPI's own included."""
    found = [
        (method, route.path)
        for route in service.app.router.routes
        for method in sorted(getattr(route, "methods", None) or ("?",))
        if isinstance(route, Route)
    ]
    assert len(found) == len({*found})
    assert len(service.app.router.routes) == len({id(route) for route in service.app.router.routes})
    return found


def path(template: str) -> str:
    for name in ("group_id", "lease_id", "engine_id", "name"):
        template = template.replace(f"{{{name}}}", {"group_id": "g-1", "engine_id": "e77"}.get(name, "nothing"))
    return template + ("?limit=1" if template == "/events" else "")


async def call(service: Service, method: str, template: str, **headers: str) -> httpx.Response:
    return await service.http.request(method, path(template), headers=headers)


def bearer(role: Role | None) -> dict[str, str]:
    return {} if role is None else {"Authorization": f"Bearer {SECRET[role]}"}


def test_every_route_has_a_decision_and_every_decision_a_route():
    known = {f"{method} {template}" for method, template in routes(Service())}
    assert known == set(ACCESS)
    assert undecided([*known, "GET /new", "POST /status"]) == ["GET /new", "POST /status"]


def test_a_route_nobody_decided_about_cannot_be_built(monkeypatch: pytest.MonkeyPatch):
    less = {route: who for route, who in ACCESS.items() if route != "POST /pause"}
    monkeypatch.setattr("rollout_service.api.access.ACCESS", less)
    with pytest.raises(ValueError, match="POST /pause"):
        Service()


@pytest.mark.parametrize("role", [None, *Role], ids=str)
async def test_each_role_may_call_what_the_table_says_and_nothing_else(role: Role | None):
    async with locked().in_process() as service:
        for method, template in routes(service):
            name = f"{method} {template}"
            answer = await call(service, method, template, **bearer(role))
            if role is Role.ADMIN or name in MAY[role]:
                assert answer.status_code not in (401, 403), (name, answer.text)
            elif role is None:
                assert answer.status_code == 401, name
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["type"] == "/problems/unauthorized"
            else:
                assert answer.status_code == 403, name
                assert answer.json()["type"] == "/problems/forbidden"
                assert role in answer.json()["detail"]


def not_keys() -> list[str]:
    good = SECRET[Role.ADMIN]
    return [
        f"Bearer {good[:-1]}",
        f"Bearer {good}x",
        f"Bearer {good.upper()}",
        f"Basic {good}",
        good,
        "Bearer",
        "Bearer ",
        "Bearer rsk_",
        f"Bearer {hash_of(good)}",
        f"Bearer {good} {good}",
        f"Bearer {'x' * 100_000}",
        "Bearer \xff\xfe",
        f"Bearer\t{good}",
    ]


@pytest.mark.parametrize("value", not_keys(), ids=range(len(not_keys())))
async def test_what_is_no_key_is_refused(value: str):
    async with locked().in_process() as service:
        answer = await service.http.get("/status", headers={"Authorization": value.encode("latin-1")})
        assert answer.status_code == 401
        assert SECRET[Role.ADMIN] not in answer.text


async def test_two_authorization_headers_are_none():
    async with locked().in_process() as service:
        value = f"Bearer {SECRET[Role.ADMIN]}"
        answer = await service.http.get("/status", headers=[("Authorization", value), ("Authorization", value)])
        assert answer.status_code == 401


async def test_the_scheme_is_read_whatever_its_letters():
    async with locked().in_process() as service:
        assert (await call(service, "GET", "/status", Authorization=f"bearer {SECRET[Role.READ]}")).status_code == 200


BAD_HOSTS = [
    "",
    "a b",
    "a/b",
    "user@host",
    "host:port",
    "host:99999999",
    "[::1",
    "x\\y",
    "ho\x7fst",
    "a,b",
    "..",
    "h?x",
]


@pytest.mark.parametrize("host", BAD_HOSTS, ids=repr)
async def test_a_malformed_host_opens_nothing(host: str):
    async with locked().in_process() as service:
        for method, template in routes(service):
            answer = await call(service, method, template, Host=host)
            assert answer.status_code == 400, (method, template)
            answer = await call(service, method, template, Host=host, **bearer(Role.ADMIN))
            assert answer.status_code == 400, (method, template)


async def test_a_path_that_is_no_route_says_nothing_without_a_key():
    async with locked().in_process() as service:
        for method, where in (("GET", "/nothing"), ("PUT", "/status"), ("GET", "/status%2f"), ("GET", "/status/")):
            assert (await service.http.request(method, where)).status_code == 401
            answer = await service.http.request(method, where, headers=bearer(Role.SUBMIT))
            assert answer.status_code == (405 if where == "/status" else 404)


async def test_a_refused_call_is_counted_by_its_route_and_its_body_is_never_read():
    async with locked().running() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(b"POST /prompts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
        assert head.startswith(b"HTTP/1.1 401")
        writer.close()
        service.http.headers.update(bearer(Role.READ))
        assert await service.counter('rollout_http_requests_total{route="POST /prompts",status="4xx"}') == 1


async def test_an_open_probe_tells_strangers_that_it_is_not_ready_without_details():
    async with locked().in_process() as service:
        service.fleet.capacity = 0
        assert (await call(service, "GET", "/readyz")).json()["reasons"] == ["no engine is healthy"]
        service.door._writer.core.halt = Halt(
            reason="1 failed group", group_id="g-1", engine="http://secret-engine", error="the prompt", since=0.0
        )
        stranger = await call(service, "GET", "/readyz")
        assert (stranger.status_code, stranger.json()["reasons"][0]) == (503, "halted")
        assert "secret-engine" not in stranger.text
        assert (await call(service, "GET", "/readyz", **bearer(Role.SUBMIT))).json()["reasons"][0] == "halted"
        known = await call(service, "GET", "/readyz", **bearer(Role.READ))
        assert "secret-engine" in known.text


async def test_the_stream_ends_when_its_key_is_revoked():
    keys = Keys(ENTRIES)
    async with Service(keys=keys).running() as service, asyncio.timeout(20):
        async with service.http.stream("GET", "/events", headers=bearer(Role.READ)) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            keys.ring = KeyRing([entry for entry in ENTRIES if entry.role is not Role.READ])
            async for _ in lines:
                pass
        assert service.viewers.count == 0


async def test_who_did_what_an_operator_does_is_in_the_log_and_no_key():
    with capture_logs() as logs:
        async with locked().in_process() as service:
            await call(service, "POST", "/pause", **bearer(Role.ADMIN))
            await call(service, "POST", "/pause", **bearer(Role.READ))
            await call(service, "GET", "/status", **bearer(Role.READ))
    calls = [line for line in logs if line["event"] == "operator_call"]
    assert [(line["route"], line["caller"]) for line in calls] == [("POST /pause", "admin")]
    assert not [key for key in SECRET.values() if key in repr(logs)]


# without keys


async def test_without_keys_everything_is_open_to_programs():
    async with Service().in_process() as service:
        assert (await call(service, "POST", "/pause", Host="whatever")).status_code == 200
        assert (await call(service, "POST", "/resume", Authorization="Bearer anything")).status_code == 200


FROM_PAGES: list[tuple[dict[str, str], int]] = [
    ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:8080"}, 200),
    ({"Host": "localhost:8080", "Accept-Language": "en"}, 200),
    ({"Host": "[::1]:8080", "Origin": "http://[::1]:8080"}, 200),
    ({"Host": "service", "Origin": "http://service"}, 200),  # server.allowed_hosts
    ({"Host": "127.0.0.1:8080", "Origin": "http://evil.example"}, 403),
    ({"Host": "127.0.0.1:8080", "Origin": "http://127.0.0.1:9999"}, 403),
    ({"Host": "127.0.0.1:8080", "Origin": "null"}, 403),
    ({"Host": "127.0.0.1:8080", "Origin": "http://["}, 403),
    ({"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}, 403),
    ({"Host": "evil.example", "Accept-Language": "en"}, 403),
    ({"Host": "127.0.0.1.evil.example", "Referer": "http://127.0.0.1.evil.example/"}, 403),
    ({"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "cross-site"}, 403),
    ({"Host": "127.0.0.1:8080", "Sec-Fetch-Site": "same-site"}, 403),
    ({"Host": "127.0.0.1:8080", "Referer": "http://evil.example/"}, 403),
    ({"Host": "127.0.0.1:8080", "Referer": "http://127.0.0.1:8080/", "Sec-Fetch-Site": "same-origin"}, 200),
]


@pytest.mark.parametrize(("headers", "status"), FROM_PAGES)
async def test_without_keys_a_page_from_elsewhere_cannot_call_through_a_browser(headers: dict[str, str], status: int):
    async with Service().in_process() as service:
        answer = await call(service, "POST", "/pause", **headers)
        assert answer.status_code == status
        assert service.door.status().paused is (status == 200)


async def test_without_keys_a_link_from_elsewhere_opens_the_page():
    async with Service().in_process() as service:
        headers = {"Host": "localhost:8080", "Referer": "http://wiki.example/", "Sec-Fetch-Site": "cross-site"}
        assert (await call(service, "GET", "/", **headers)).status_code == 200
        assert (await call(service, "GET", "/status", **headers)).status_code == 403


async def test_a_key_revoked_while_a_call_is_on_its_way_is_refused_at_its_end():
    keys = Keys(ENTRIES)
    less = KeyRing([entry for entry in ENTRIES if entry.role is not Role.TRAINER])
    async with Service(keys=keys, runner=Runner(answer=lambda job: finished(job.index))).running() as service:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = f"POST /checkpoints HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET[Role.TRAINER]}\r\n"
        writer.write(f"{head}Content-Length: 12\r\n\r\n".encode())
        waiting = asyncio.create_task(
            service.http.post("/leases", json={"max_groups": 1, "wait_s": 30}, headers=bearer(Role.TRAINER))
        )
        await until(lambda: service.door.status().waiting_lease_calls == 1)
        keys.ring = less
        writer.write(b'{"name":"a"}')
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)).startswith(b"HTTP/1.1 401")
        writer.close()
        assert list(await service.door.checkpoints()) == []
        body = {"prompts": [{"prompt_id": "a", "prompt": "p:a;"}]}
        assert (await service.http.post("/prompts", json=body, headers=bearer(Role.SUBMIT))).status_code == 202
        assert (await waiting).status_code == 401
        await until(lambda: service.door.status().counts.groups["ready"] == 1)


async def test_keys_of_a_file_are_read_again_when_it_changes_and_an_empty_one_lets_nobody_in(tmp_path: Path):
    file = tmp_path / "keys.toml"
    file.write_text(key_table(ENTRIES[0], "keys"))
    keys = Keys((), file)

    async def status(role: Role) -> int:
        return (await call(service, "GET", "/status", **bearer(role))).status_code

    async with Service(keys=keys).in_process() as service:
        assert (await status(ENTRIES[0].role), await status(ENTRIES[1].role)) == (200, 401)
        file.write_text(key_table(ENTRIES[1], "keys"))
        assert keys.reload()
        assert not keys.reload()
        assert (await status(ENTRIES[0].role), await status(ENTRIES[1].role)) == (401, 200)
        file.write_text("keys = 7")
        with pytest.raises(ConfigError, match=r"\[\[keys\]\]"):
            keys.reload()
        assert await status(ENTRIES[1].role) == 200
        file.unlink()
        with pytest.raises(ConfigError, match="No such file"):
            keys.reload()
        assert await status(ENTRIES[1].role) == 200
        file.write_text("")
        assert keys.reload()
        assert await status(ENTRIES[1].role) == 401


def test_the_table_opens_to_everybody_only_what_holds_nothing_of_the_run():
    assert {route for route, who in ACCESS.items() if who is EVERYBODY} == OPEN


def test_the_document_says_who_may_call_what():
    for path, operations in Service().app.openapi()["paths"].items():
        for verb, operation in operations.items():
            name = f"{verb.upper()} {path}"
            if name in OPEN:
                assert operation["security"] == [], name
            else:
                assert operation["security"] == [{"key": []}], name
                assert {"401", "403"} <= operation["responses"].keys()
                assert set(operation["x-roles"]) == {"admin"} | {role for role in MAY if role and name in MAY[role]}


async def test_no_answer_is_taken_for_something_else_by_a_browser(service: Service):
    answers: list[Any] = [await service.http.get(where) for where in ("/", "/status", "/nothing", "/metrics")]
    assert all(answer.headers["x-content-type-options"] == "nosniff" for answer in answers)
