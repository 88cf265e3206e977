"""Prompts of outstanding groups in memory, and the identities known without asking the store.

What always holds: `size` is the sum over the prompts held; an identity stays known here until its group's end is
committed, from when on the store knows it.
"""

from __future__ import annotations

from collections.abc import Collection

from rollout_service.core.model import Prompt, prompt_size
from rollout_service.store.protocol import Store

LOAD_CHUNK = 1000
"""Prompts read at once at a start: bounds the memory of one answer."""


class PromptMemory:
    def __init__(self) -> None:
        self.size = 0
        """Bytes, by `prompt_size`."""
        self.keys: dict[tuple[str, int], tuple[int, bytes]] = {}
        """Identity -> (seq, digest)."""
        self._prompts: dict[int, Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, seq: int) -> Prompt:
        return self._prompts[seq]

    def add(self, seq: int, prompt: Prompt) -> None:
        self._prompts[seq] = prompt
        self.size += prompt_size(prompt)

    def discard(self, seq: int) -> None:
        prompt = self._prompts.pop(seq, None)
        if prompt is not None:
            self.size -= prompt_size(prompt)

    def forget_key(self, key: tuple[str, int]) -> None:
        self.keys.pop(key, None)

    async def load(self, store: Store, seqs: Collection[int]) -> None:
        """Read the prompts of `seqs`. Raises StoreUnavailable."""
        ordered = sorted(seqs)
        for start in range(0, len(ordered), LOAD_CHUNK):
            for seq, prompt in (await store.prompts(ordered[start : start + LOAD_CHUNK])).items():
                self.add(seq, prompt)
