"""The weights of one engine: which it says it has, and how it gets new ones.

What always holds: an engine that was paused here is told to resume, whatever happened in between; the version is
announced only after the weights were loaded, so an engine never reports weights it does not have. An engine is behind
when it has reported weight versions and now reports an older one, or none (a restarted vLLM serves its first weights
as `default`), and when it did not follow an update; newer than the run is not behind: a trainer that loads the weights
itself posts the version afterwards.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import structlog

from rollout_service.core.model import WeightUpdate
from rollout_service.engines.faults import BadAnswer, EngineFault, StatusFault

PAUSE_S = 60.0
"""A pause waits for the engine's current step, not for its requests."""
ANNOUNCE_S = 30.0
INFO_S = 5.0

log = structlog.get_logger(__name__)


class Control(Protocol):
    """The control routes of an engine."""

    @property
    def url(self) -> str: ...

    async def control(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> bytes:
        """The body of the answer. Raises EngineFault for everything but 200."""


class FleetReports:
    """Whether any engine of a fleet has reported the version of the run: then the versions mean something."""

    def __init__(self) -> None:
        self.seen = False


class WeightStanding:
    """What is known of one engine's weights."""

    def __init__(self, fleet: FleetReports | None = None) -> None:
        self.reported: str | None = None
        """The weight version it reported last; None: it has no such route, or was never asked."""
        self.why_behind: str | None = None
        """Why it may get no work; None: it may."""
        self._reports = self._reported_before = False
        self._fleet = fleet if fleet is not None else FleetReports()
        self._loaded: int | None = None
        self._missed: str | None = None
        self._seen_since_missed = True

    @property
    def reports(self) -> bool:
        """Whether it has ever reported the version of the run."""
        return self._reports

    def saw(self, reported: str | None, current: int) -> None:
        """It reports `reported` (None: it cannot); `current` was the policy version when it was asked."""
        if self._seen_since_missed and reported != self.reported:
            self._missed = None  # somebody has loaded something since
        self.reported, self._seen_since_missed = reported, True
        number = int(reported) if reported is not None and reported.isascii() and reported.isdecimal() else None
        if number is not None and number == current > 0:
            self._reports = self._fleet.seen = True
        # An engine that has followed an update whose version is not posted yet (a lower one, in a reset) is not behind.
        needed = current if self._loaded is None else min(current, self._loaded)
        counts = self._reports or (self._fleet.seen and reported is not None)
        if self._missed is not None:
            self.why_behind = self._missed
        elif counts and (number is None or number < needed):
            has = "does not say which weights it has" if reported is None else f"reports the weights {reported!r}"
            self.why_behind = f"it {has}, the policy version is {current}"
        else:
            self.why_behind = None

    def loaded(self, version: int) -> None:
        """It has loaded and announced `version`."""
        self.reported, self.why_behind, self._loaded = str(version), None, version
        self._reports, self._missed = True, None

    def untouched(self) -> None:
        """The update it missed changed no engine: it has what it had."""
        self._missed = self.why_behind = None
        self._reports = self._reported_before

    def missed(self, version: int, why: str) -> None:
        """It did not load `version`: whatever it serves now is not that, until it reports something else.

        What it reports now is read at the next occasion: a load that failed half-way may have killed it.
        """
        if self._missed is None:
            self._reported_before = self._reports
        self._reports, self._seen_since_missed = True, False
        self._missed = self.why_behind = f"it did not load the weights of version {version}: {why}"


class LoadFailed(Exception):
    """An engine did not load. `touched`: its weights, or what it is doing, may be another than before."""

    def __init__(self, detail: str, *, touched: bool) -> None:
        super().__init__(detail)
        self.touched = touched


class _Info(msgspec.Struct):
    weight_version: str


async def weight_version(engine: Control) -> str | None:
    """What the engine reports; None where it has no such route. Raises EngineFault."""
    try:
        raw = await engine.control("GET", "/weight_info", timeout_s=INFO_S)
    except StatusFault as fault:
        if fault.status in (404, 405):
            return None
        raise
    try:
        return msgspec.json.decode(raw, type=_Info).weight_version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"/weight_info: {error}") from error


async def load(engine: Control, update: WeightUpdate, *, timeout_s: float) -> None:
    """Pause (`keep`), load, announce the version, resume. `timeout_s` bounds the loading. Raises LoadFailed."""
    sent = False
    try:
        # Pausing also empties the prefix cache, whose entries are states of the old weights.
        await engine.control("POST", "/pause?mode=keep", timeout_s=PAUSE_S)
        sent = True
        await _load(engine, update, timeout_s)
        await engine.control(
            "POST", "/update_weight_version", {"new_version": str(update.version)}, timeout_s=ANNOUNCE_S
        )
    except BaseException as error:
        try:
            await engine.control("POST", "/resume", timeout_s=ANNOUNCE_S)
        except EngineFault as fault:
            # What went wrong first is on its way; a dead engine cannot resume anyhow.
            log.warning("engine_could_not_resume", engine=engine.url, error=str(fault))
            if isinstance(error, EngineFault):
                raise LoadFailed(str(error), touched=True) from error
        if not isinstance(error, EngineFault):
            raise
        refused = isinstance(error, StatusFault) and error.status < 500
        raise LoadFailed(str(error), touched=sent and not refused) from error
    try:
        await engine.control("POST", "/resume", timeout_s=ANNOUNCE_S)
    except EngineFault as fault:
        raise LoadFailed(str(fault), touched=True) from fault


async def unload_adapter(engine: Control, name: str) -> None:
    """Take a LoRA adapter out of the engine. Raises EngineFault."""
    await engine.control("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=ANNOUNCE_S)


async def _load(engine: Control, update: WeightUpdate, timeout_s: float) -> None:
    if update.lora_name is None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": update.path}}
        try:
            await engine.control("POST", "/collective_rpc", body, timeout_s=timeout_s)
        except StatusFault as fault:
            if fault.status != 404:
                raise
            raise StatusFault(404, "no /collective_rpc: the server needs VLLM_SERVER_DEV_MODE=1") from fault
        return
    adapter = {"lora_name": update.lora_name, "lora_path": update.path}
    try:
        await engine.control("POST", "/v1/load_lora_adapter", adapter, timeout_s=timeout_s)
    except StatusFault as fault:
        # An earlier try loaded it and its answer was lost, or the trainer uses one name for every version.
        if fault.status != 400 or "already been loaded" not in str(fault):
            raise
        await engine.control("POST", "/v1/load_lora_adapter", adapter | {"load_inplace": True}, timeout_s=timeout_s)
