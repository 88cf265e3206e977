"""The text of single tokens, for people who look at a completion token by token.

What always holds: nothing here touches what rewards are told or which engine gets work; what is kept is bounded; a call
asks for a bounded number of texts, in a bounded time, and goes without the rest.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import structlog

from rollout_service.engines.faults import EngineFault

MOST_KEPT = 300_000
"""More than any vocabulary."""
MOST_ASKED = 4_096
"""New ones of one call."""
AT_ONCE = 16
WITHIN_S = 5.0

log = structlog.get_logger(__name__)


class Detokenizer(Protocol):
    async def detokenize(self, ids: array[int]) -> str | None:
        """None: it has no such route. Raises EngineFault."""


class TokenTexts:
    """Belongs to one fleet: all its engines serve one model."""

    def __init__(self) -> None:
        self._kept: dict[int, str] = {}

    async def of(self, ids: Collection[int], engine: Detokenizer | None) -> Mapping[int, str]:
        """Id → text, as far as known or to be had of `engine` in time."""
        wanted = [id_ for id_ in dict.fromkeys(ids) if id_ not in self._kept][:MOST_ASKED]
        if wanted and engine is not None:
            source = iter(wanted)
            workers = [asyncio.create_task(self._ask(source, engine)) for _ in range(min(AT_ONCE, len(wanted)))]
            try:
                async with asyncio.timeout(WITHIN_S):
                    await asyncio.gather(*workers)
            except TimeoutError:
                log.info("token_texts_incomplete", wanted=len(wanted), after_s=WITHIN_S)
            except EngineFault as fault:
                log.info("token_texts_incomplete", wanted=len(wanted), error=str(fault))
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return {id_: self._kept[id_] for id_ in ids if id_ in self._kept}

    async def _ask(self, source: Iterator[int], engine: Detokenizer) -> None:
        for id_ in source:
            text = await engine.detokenize(array("i", (id_,)))
            if text is None:
                return
            if len(self._kept) < MOST_KEPT:
                self._kept[id_] = text
