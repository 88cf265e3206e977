"""Weights into engines that load them from disk: the order of calls, whole files only, and nobody left paused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.processes import free_port
from trainer_client.trl import ReloadWeightTransfer, WeightTransferError


class Engine:
    """An engine that notes what is asked of it; paths in `refuse` answer 500."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.refuse: set[str] = set()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                self.answer(json.loads(self.rfile.read(length)) if length else None)

            def answer(self, body: Any) -> None:
                engine.seen.append((self.path, body))
                path = self.path.partition("?")[0]
                status = 500 if path in engine.refuse else 200
                said = b'{"error": "no room"}' if status == 500 else b"{}"
                self.send_response(status)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.seen]

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Versions:
    def __init__(self, version: int) -> None:
        self.version = version

    def next_version(self) -> int:
        return self.version


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made = [Engine(), Engine()]
    yield made
    for engine in made:
        engine.stop()


@pytest.fixture
def transfer(engines: list[Engine], tmp_path: Path) -> Iterator[Callable[..., ReloadWeightTransfer]]:
    made: list[ReloadWeightTransfer] = []

    def make(*urls: str, **options: Any) -> ReloadWeightTransfer:
        made.append(ReloadWeightTransfer(urls or [e.url for e in engines], tmp_path / "weights", **options))
        return made[-1]

    yield make
    for one in made:
        one.destroy()


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(2, 2)
    yield "b", torch.arange(6.0).reshape(2, 3).T


SYNC = ["/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/resume"]


def sync(transfer: ReloadWeightTransfer) -> None:
    transfer.pause()
    transfer.send_weights(weights())
    transfer.resume()


def test_every_engine_is_paused_loads_is_told_its_version_and_goes_on(engines, transfer, tmp_path):
    one = transfer(worker=Versions(8))
    one.init_weight_transfer()
    sync(one)
    for engine in engines:
        assert engine.paths == ["/health", *SYNC]
        bodies = dict(engine.seen)
        folder = str((tmp_path / "weights").resolve())
        assert bodies["/collective_rpc"] == {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        assert bodies["/update_weight_version"] == {"new_version": "8"}


def test_the_file_holds_the_weights_and_nothing_else_is_left(transfer, tmp_path):
    one = transfer()
    one.init_weight_transfer()
    sync(one)
    loaded = load_file(tmp_path / "weights" / "model.safetensors")
    assert torch.equal(loaded["b"], torch.arange(6.0).reshape(2, 3).T)
    assert sorted(loaded) == ["a", "b"]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]


def test_tensors_are_copied_as_they_come(transfer, tmp_path):
    live = torch.zeros(2)

    def changing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", live
        live.fill_(9.0)
        yield "b", live

    one = transfer()
    one.init_weight_transfer()
    one.send_weights(changing())
    loaded = load_file(tmp_path / "weights" / "model.safetensors")
    assert loaded["a"].tolist() == [0.0, 0.0]
    assert loaded["b"].tolist() == [9.0, 9.0]


def test_without_a_worker_versions_are_counted_from_the_first(engines, transfer):
    one = transfer(engines[0].url, first_version=5)
    one.init_weight_transfer()
    sync(one)
    one.pause()
    one.resume()  # nothing was sent: no new version
    sync(one)
    told = [body["new_version"] for path, body in engines[0].seen if path == "/update_weight_version"]
    assert told == ["5", "6"]


def test_weights_that_cannot_be_written_leave_the_last_file_and_no_other(engines, transfer, tmp_path):
    def breaking() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(1)
        raise ZeroDivisionError

    one = transfer()
    one.init_weight_transfer()
    sync(one)
    with pytest.raises(ZeroDivisionError):
        one.send_weights(breaking())
    assert sorted(load_file(tmp_path / "weights" / "model.safetensors")) == ["a", "b"]
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["model.safetensors"]
    assert engines[0].paths.count("/collective_rpc") == 1


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_an_engine_that_refuses_is_named_with_what_it_said(engines, transfer, path):
    engines[1].refuse.add(path)
    one = transfer()
    one.init_weight_transfer()
    with pytest.raises(WeightTransferError) as raised:
        sync(one)
    said = str(raised.value)
    assert engines[1].url in said
    assert path in said
    assert "no room" in said
    assert engines[0].url not in said


@pytest.mark.parametrize("path", ["/update_weight_version", "/resume"])
def test_resume_reaches_every_engine_whatever_one_of_them_says(engines, transfer, path):
    engines[0].refuse.add(path)
    one = transfer()
    one.init_weight_transfer()
    with pytest.raises(WeightTransferError):
        sync(one)
    assert [engine.paths[-1] for engine in engines] == ["/resume", "/resume"]


def test_all_engines_that_fail_are_named(engines, transfer):
    for engine in engines:
        engine.refuse.add("/pause")
    one = transfer()
    one.init_weight_transfer()
    with pytest.raises(WeightTransferError) as raised:
        one.pause()
    assert all(engine.url in str(raised.value) for engine in engines)


def test_destroy_resumes_what_was_left_paused_once(engines, transfer, caplog):
    one = transfer()
    one.init_weight_transfer()
    one.pause()
    engines[0].refuse.add("/resume")
    one.destroy()
    one.destroy()
    assert [engine.paths.count("/resume") for engine in engines] == [1, 1]
    assert engines[0].url in caplog.text
    with pytest.raises(WeightTransferError, match="destroyed"):
        one.pause()


def test_destroy_before_anything_asks_nothing(engines, transfer):
    transfer().destroy()
    assert engines[0].seen == []


def test_an_engine_that_does_not_get_healthy_is_named(engines, transfer):
    engines[0].refuse.add("/health")
    with pytest.raises(WeightTransferError, match=rf"{engines[0].url} was not healthy.*no room"):
        transfer(ready_within_s=0).init_weight_transfer()


def test_an_engine_nobody_listens_for_is_named(transfer):
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WeightTransferError, match=f"engine {gone}, POST /pause: ConnectError"):
        transfer(gone).pause()


@pytest.mark.parametrize("urls", [[], "http://127.0.0.1:8000"])
def test_engines_are_a_list(urls, tmp_path):
    with pytest.raises(ValueError, match="engine_urls"):
        ReloadWeightTransfer(urls, tmp_path)
