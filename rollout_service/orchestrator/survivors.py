"""What memory holds of finished rollouts until their group is scored, and of scored groups until they are delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_service.core.group import Group
from rollout_service.core.model import FinishedRollout
from rollout_service.store.protocol import Store


class Survivors:
    """By group; everything of an attempt goes when the attempt is over. After a restart the store has the rest."""

    def __init__(self) -> None:
        self._rollouts: dict[tuple[int, int], dict[int, FinishedRollout]] = {}
        self._tokens: dict[int, int] = {}
        self._means: dict[int, float | None] = {}

    def add(self, seq: int, attempt: int, rollout: FinishedRollout) -> None:
        self._rollouts.setdefault((seq, attempt), {})[rollout.index] = rollout
        self._tokens[seq] = self._tokens.get(seq, 0) + rollout.output_tokens

    async def of(self, group: Group, store: Store) -> Sequence[FinishedRollout]:
        """The survivors of a group that is being scored, by row number. Raises StoreUnavailable."""
        rollouts: Mapping[int, FinishedRollout] = self._rollouts.get((group.seq, group.attempt), {})
        if len(rollouts) < len(group.finished):  # a restart lies between
            (payload,) = await store.payloads([group.seq])
            stored = {i: r for i, r in payload.rollouts.items() if isinstance(r, FinishedRollout)}
            rollouts = {**stored, **rollouts}
            self._tokens[group.seq] = sum(rollout.output_tokens for rollout in rollouts.values())
        return tuple(rollouts[index] for index in sorted(group.finished))

    def scored(self, seq: int, attempt: int, mean: float | None) -> None:
        """The payload is in the store and needed here no more."""
        self._rollouts.pop((seq, attempt), None)
        self._means[seq] = mean

    def end(self, seq: int, attempt: int) -> int:
        """The attempt is over; the tokens it had generated, as far as known here."""
        self._rollouts.pop((seq, attempt), None)
        self._means.pop(seq, None)
        return self._tokens.pop(seq, 0)

    def delivery(self, seq: int) -> tuple[int, float | None]:
        """(tokens, mean reward) of a group that goes out, as far as known here."""
        return self._tokens.get(seq, 0), self._means.get(seq)
