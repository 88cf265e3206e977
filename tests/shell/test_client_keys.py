"""The client's API key: where it comes from, who gets it, and where it never shows. Every test runs on both drivers."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from tests.client_script import DRIVERS, Fault, ScriptedService, group, problem
from trainer_client import Denied, Forbidden, NotFound, RolloutClient, Unauthorized, UnexpectedAnswer
from trainer_client.tensors import RolloutDataset
from trainer_client.trl import RemoteRolloutWorker

KEY = "rsk_3q0Zk7m2xQ"


@pytest.fixture
def service() -> Iterator[ScriptedService]:
    service = ScriptedService().start()
    yield service
    service.stop()


@pytest.fixture(params=DRIVERS, ids=["blocking", "asyncio"])
def connect(
    request: pytest.FixtureRequest, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    monkeypatch.delenv("ROLLOUT_SERVICE_KEY", raising=False)
    clients: list[Any] = []

    def make(**options: Any) -> Any:
        clients.append(request.param(service.url, **{"retry_for_s": 5.0, "timeout_s": 10.0, **options}))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def sent(service: ScriptedService) -> set[str]:
    """Every Authorization header of the requests so far; "" for a request without one."""
    return {header for headers in service.authorizations for header in headers or [""]}


def test_the_key_goes_with_every_call(service, connect):
    service.ready = [group("g1")]
    client = connect(api_key=KEY)
    client.status()
    client.ack(client.lease(wait_s=0))
    assert sent(service) == {f"Bearer {KEY}"}


def test_without_one_it_is_the_environments(service, connect, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVICE_KEY", f"{KEY}\n")
    connect().status()
    assert sent(service) == {f"Bearer {KEY}"}


def test_a_key_that_is_given_wins_over_the_environments_and_an_empty_one_is_none(service, connect, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVICE_KEY", "rsk_other")
    connect(api_key=KEY).status()
    connect(api_key="").status()
    assert service.authorizations == [[f"Bearer {KEY}"], []]


def test_prefetch_has_it_too(service, connect, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVICE_KEY", "rsk_other")
    service.ready = [group("g1"), group("g2")]
    with connect(api_key=KEY).prefetch(max_groups=1) as leases:
        assert len(list(leases)) == 2
    assert sent(service) == {f"Bearer {KEY}"}


def test_a_dataset_and_trls_worker_pass_it_on(service, monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVICE_KEY", "rsk_other")
    service.ready = [group("g1")]
    assert len(list(RolloutDataset(service.url, 1, api_key=KEY))) == 1
    worker = RemoteRolloutWorker(service.url, api_key=KEY)
    worker.update_model_version(1)
    worker.stop()
    assert sent(service) == {f"Bearer {KEY}"}
    with RolloutClient(service.url) as client, pytest.raises(ValueError, match="its own"):
        RolloutDataset(client, 1, api_key=KEY)


@pytest.mark.parametrize(("status", "kind"), [(401, Unauthorized), (403, Forbidden)])
def test_a_refusal_is_told_apart_and_never_repeated(service, connect, status, kind):
    service.faults = [Fault("/status", answer=lambda: problem(status, "unauthorized", "no such key"))] * 2
    with pytest.raises(kind, match="no such key") as caught:
        connect(api_key=KEY).status()
    assert isinstance(caught.value, Denied)
    assert len(service.seen) == 1
    if kind is Unauthorized:
        assert "api_key" in str(caught.value)
        assert "ROLLOUT_SERVICE_KEY" in str(caught.value)


def test_a_redirect_takes_the_key_nowhere(service, connect):
    other = ScriptedService().start()
    try:
        there = {"Location": f"{other.url}/status"}
        service.faults = [Fault("/status", answer=lambda: web.Response(status=307, headers=there))]
        with pytest.raises(UnexpectedAnswer):
            connect(api_key=KEY).status()
        assert other.seen == []
    finally:
        other.stop()


def test_the_key_shows_in_no_repr_error_or_log(service, connect, caplog):
    caplog.set_level(logging.DEBUG)
    client = connect(api_key=KEY, retry_for_s=0.2)
    shown = [repr(client), repr(vars(client)), str(vars(client))]
    if isinstance(client, RolloutClient):
        shown.append(repr(vars(client._http)))
        prefetch = client.prefetch()
        shown += [repr(prefetch), repr(vars(prefetch))]
        parts = [part for part in vars(prefetch).values() if isinstance(part, functools.partial)]
        assert parts, "the test looks at what holds the key"
        shown += [repr(part) for part in parts]
    service.faults = [Fault("/status", answer=lambda: problem(401, "unauthorized", "no"))]
    with pytest.raises(Unauthorized) as refused:
        client.status()
    service.stop()
    with pytest.raises(Exception, match="status") as gone:
        client.status()
    for error in (refused.value, gone.value):
        shown += [repr(error), repr(vars(error)), "".join(traceback.format_exception(error))]
    assert KEY not in "".join(shown) + caplog.text


@pytest.mark.parametrize("key", ["rsk a", "rsk_\u00e9", "rsk_a\nrsk_b", "rsk_\x00"])
def test_what_can_be_no_key_is_refused_and_not_repeated(key, monkeypatch):
    with pytest.raises(ValueError, match="api_key is no API key") as caught:
        RolloutClient("http://127.0.0.1:1", api_key=key)
    assert key not in str(caught.value)
    if "\x00" not in key:
        monkeypatch.setenv("ROLLOUT_SERVICE_KEY", key)
        with pytest.raises(ValueError, match="ROLLOUT_SERVICE_KEY"):
            RolloutClient("http://127.0.0.1:1")


# engines


def test_engines_are_added_and_removed(service, connect):
    client = connect()
    assert client.add_engine("http://e:8000", max_inflight=7)["max_inflight"] == 7
    assert client.add_engine("http://e:8000")["id"] == "e1"
    client.add_engine("http://e:8000", max_inflight="auto")
    assert client.remove_engine("e1", drain_s=5)["leaving"]
    assert [(seen.method, seen.path, seen.body) for seen in service.seen] == [
        ("POST", "/engines", {"url": "http://e:8000", "max_inflight": 7}),
        ("POST", "/engines", {"url": "http://e:8000"}),
        ("POST", "/engines", {"url": "http://e:8000", "max_inflight": "auto"}),
        ("DELETE", "/engines/e1?drain_s=5", None),
    ]


def test_a_removal_whose_answer_was_lost_is_done(service, connect):
    service.faults = [Fault("/engines", cut="after")]
    assert connect().remove_engine("e1") is None
    assert len(service.seen) == 2
    with pytest.raises(NotFound):
        connect().remove_engine("e1")
