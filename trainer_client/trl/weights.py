"""The trainer's weights into vLLM servers that load them from disk.

What always holds: engines load a complete file or none (it is renamed into place); no engine gets new weights before
every engine stands still; a version is announced before its engine goes on; an engine that was paused here is resumed,
at the latest by `destroy`. Every error names its engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer_client.errors import ClientError

if TYPE_CHECKING:
    import httpx
    import torch

logger = logging.getLogger("trainer_client")

HEALTH_POLL_S = 0.5
LAST_RESUME_S = 30.0
"""Nobody should wait for an engine that is gone when training has ended."""
FILE = "model.safetensors"


class WeightTransferError(ClientError):
    """An engine did not do its part of a weight sync."""


class Versions(Protocol):
    """What is needed of the worker."""

    def next_version(self) -> int: ...


class ReloadWeightTransfer:
    """`weight_transfer` of TRL's `AsyncGRPOTrainer`, for vLLM servers in dev mode (`VLLM_SERVER_DEV_MODE=1`).

    `engine_urls`: every engine of the service; `folder`: where the weights are written, the same path here and at the
    engines. Requests in flight are frozen and go on with the new weights (`/pause?mode=keep`).

    The version an engine reports must be the service's policy version, or the service takes it for one that missed an
    update: `worker` says which that will be. Without a worker they are counted from `first_version`.

    `ready_within_s`: how long engines may take to become healthy at the start; `timeout_s`: longest silence during a
    call, loading included. Raises WeightTransferError.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        folder: str | os.PathLike[str],
        *,
        worker: Versions | None = None,
        first_version: int = 1,
        ready_within_s: float = 240.0,
        timeout_s: float = 600.0,
    ) -> None:
        import httpx

        if isinstance(engine_urls, str) or not engine_urls:
            raise ValueError("engine_urls is a list with the address of at least one engine")
        self._folder = Path(folder).resolve()
        self._worker = worker
        self._version = first_version
        self._ready_within_s = ready_within_s
        self._http = {url: httpx.Client(base_url=url.rstrip("/"), timeout=timeout_s) for url in engine_urls}
        self._paused: set[str] = set()
        self._sent = False

    def init_weight_transfer(self) -> None:
        """Wait until every engine is healthy."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._on_each(self._wait_healthy)

    def pause(self) -> None:
        """Every engine stands still."""
        self._paused.update(self._http)  # also where the answer is lost
        self._on_each(lambda url: self._call(url, "/pause", params={"mode": "keep"}))

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Write the weights and have every engine load them. Tensors are copied as they come: they are live."""
        import torch
        from safetensors.torch import save_file

        partial = self._folder / f".{FILE}.{os.getpid()}"
        try:
            weights = {
                name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                for name, tensor in iterator
            }
            save_file(weights, partial)
            os.replace(partial, self._folder / FILE)
        finally:
            partial.unlink(missing_ok=True)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        self._on_each(lambda url: self._call(url, "/collective_rpc", json=body))
        self._sent = True

    def resume(self) -> None:
        """Announce the version on every engine and have it go on. Each is resumed, whatever another one says."""
        version = self._worker.next_version() if self._worker is not None else self._version

        def announce_and_resume(url: str) -> None:
            try:
                if self._sent:
                    self._call(url, "/update_weight_version", json={"new_version": str(version)})
            finally:
                self._call(url, "/resume")
                self._paused.discard(url)

        self._on_each(announce_and_resume)
        self._version += self._sent
        self._sent = False

    def destroy(self) -> None:
        """Resume what was left paused, and close the connections. May be called again."""
        for url in sorted(self._paused):
            try:
                self._call(url, "/resume", timeout=LAST_RESUME_S)
            except WeightTransferError as error:
                logger.warning("left paused: %s", error)
        self._paused.clear()
        for http in self._http.values():
            http.close()
        self._http.clear()

    def _on_each(self, call: Callable[[str], object]) -> None:
        """All engines at once, each to its end; one error for all that failed."""
        if not self._http:
            raise WeightTransferError("this weight transfer has been destroyed; make a new one")
        with ThreadPoolExecutor(len(self._http), thread_name_prefix="trainer-client-weights") as pool:
            calls = [pool.submit(call, url) for url in self._http]
        failed = [error for done in calls if (error := done.exception()) is not None]
        for error in failed:
            if not isinstance(error, WeightTransferError):
                raise error
        if failed:
            raise WeightTransferError("; ".join(str(error) for error in failed))

    def _call(self, url: str, path: str, **arguments: object) -> None:
        import httpx

        try:
            answer = self._http[url].post(path, **arguments)  # type: ignore[arg-type]  # httpx's own keywords
        except httpx.RequestError as error:
            raise WeightTransferError(
                f"engine {url}, POST {path}: {type(error).__name__}: {str(error) or 'no answer in time'}"
            ) from error
        if answer.status_code >= 400:
            raise WeightTransferError(f"engine {url}, POST {path}: {_said(answer)}")

    def _wait_healthy(self, url: str) -> None:
        import httpx

        deadline = time.monotonic() + self._ready_within_s
        while True:
            try:
                answer = self._http[url].get("/health", timeout=5.0)
                if answer.status_code == 200:
                    return
                said = _said(answer)
            except httpx.RequestError as error:
                said = f"{type(error).__name__}: {error}"
            if time.monotonic() >= deadline:
                raise WeightTransferError(f"engine {url} was not healthy within {self._ready_within_s:g} s: {said}")
            time.sleep(HEALTH_POLL_S)


def _said(answer: httpx.Response) -> str:
    hint = ""
    if answer.status_code == 404:
        hint = "; is it a vLLM server with VLLM_SERVER_DEV_MODE=1?"
    return f"HTTP {answer.status_code}: {answer.text[:300]}{hint}"
