"""What `rollout-service check` does beyond reading the configuration. Contacts no engine and opens no store."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollout_service.app import load_keys, load_program, make_scorer, open_prompts
from rollout_service.engines import LookFailed, read_engines
from rollout_service.errors import ConfigError
from rollout_service.metrics import Metrics
from rollout_service.rollouts import Threads
from rollout_service.settings import Settings
from rollout_service.settings.urls import EnginesFile
from rollout_service.tracing import open_tracing


async def check_all(settings: Settings, config_dir: Path | None) -> None:
    """Raises ConfigError for the first thing that would keep the service from starting."""
    path = settings.store.sqlite_path
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"store.url: the folder {path.parent} does not exist")
    load_keys(settings)
    for position, engine in enumerate(settings.engines):
        if isinstance(engine.source, EnginesFile):
            try:
                await asyncio.to_thread(read_engines, engine.source.path)
            except LookFailed as failed:
                raise ConfigError(f"engines.{position}.url: {failed}") from None
    tracing = open_tracing(settings.tracing.endpoint, settings.tracing.sample_ratio)
    if tracing is not None:
        await tracing.stop()
    prompts = await asyncio.to_thread(open_prompts, settings)
    if prompts is not None:
        prompts.close()
    load_program(settings, config_dir, Threads(1, grace_s=0))
    scorer = make_scorer(settings, config_dir, Metrics())
    try:
        await scorer.start()
    finally:
        await scorer.stop()
