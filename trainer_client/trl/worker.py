"""A rollout-service as the `rollout_worker` of TRL's `AsyncGRPOTrainer`.

What always holds:

- Two threads meet here: TRL's, which calls every public method, and the feeder's. What both change is the buffer and
  its ledger, under the buffer's one lock; no HTTP call is made while it is held.
- A version is posted only after the groups trained so far are acked; and it never falls, unless a rewind was asked for.
- A group is acked, given back, or named in a warning as lost. `stop` leaves none behind.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_client.client import RolloutClient
from trainer_client.errors import ClientError, Conflict, NotFound, ServiceUnreachable
from trainer_client.trl import metrics
from trainer_client.trl.buffer import RolloutBuffer
from trainer_client.trl.feeder import Feeder
from trainer_client.trl.health import Watch

logger = logging.getLogger("trainer_client")

BRIEF_S = 5.0
"""How long one call may be silent where nobody should wait: the feeder's, and looking in from the trainer's thread."""
PATIENCE_S = 120.0
"""Covers a restart of the service with many outstanding groups."""


class RemoteRolloutWorker:
    """Leases scored groups from the rollout-service at `url` for TRL to train on, and posts TRL's versions to it.

    It leases whenever TRL finds its queue empty: at most `groups_per_lease` groups, the groups of a step are a good
    number. `queue_maxsize`: most rows in that queue (0: no bound); `max_staleness`: S, the service's own where None,
    and TRL's `max_staleness` should not be smaller; `consumer`, `lease_s`: of its leases, which are renewed at half of
    their time. `api_key`: as in `RolloutClient`; a key of role trainer.

    **Versions.** TRL counts its weight syncs from 1 whenever it starts; the service's policy version only rises. The
    first sync settles the difference, by one of:

    - nothing given: TRL's next version becomes the service's current version plus one (a fresh service: the same);
    - `rewind_to="step-400"`: the service goes back to that mark first (see `MarkOnSave`), and counts on from there. For
      `trainer.train(resume_from_checkpoint=…)`;
    - `version_offset=k`: TRL's n is the service's n + k.

    With a LoRA adapter that TRL loads into vLLM by itself (no `weight_transfer` given), every version is a model of its
    own, `trl-policy-v{n}` in TRL's count: set `model = "trl-policy-v{policy_version}"` in the service's configuration
    and `version_offset=0` here, so that both counts are one; the service's store must then be as new as the run.

    **Acks.** TRL does not say what it has trained. A group is acked at the first version after its last row left the
    buffer. TRL fetches one micro-batch more than it trains, so that may be a micro-batch too early. `samples_ahead` =
    the rows of a micro-batch (`per_device_train_batch_size` times processes; not fixed where TRL has a `token_budget`)
    makes it exact, and `MarkOnSave` sets it by itself. What was trained after the last version, where
    `weight_sync_steps` is above 1, is given back at the end.

    **Troubles.** `retry_for_s`: how long posting a version or an ack is tried before training ends;
    `unreachable_after_s`: how long the service may be gone while TRL waits for rows. A restart within both costs the
    wait only.

    Other processes than the main one may make one too: nothing is opened before TRL calls.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        groups_per_lease: int = 8,
        queue_maxsize: int = 1024,
        max_staleness: int | None = None,
        consumer: str = "trl",
        lease_s: int = 600,
        version_offset: int | None = None,
        rewind_to: str | None = None,
        retry_for_s: float = PATIENCE_S,
        unreachable_after_s: float = PATIENCE_S,
        samples_ahead: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if version_offset is not None and rewind_to is not None:
            raise ValueError("version_offset and rewind_to exclude each other: a rewind settles the offset")
        if not 1 <= groups_per_lease <= 1024:
            raise ValueError(f"groups_per_lease is 1 to 1024, not {groups_per_lease}")
        if not 4 <= lease_s <= 86400:
            raise ValueError(f"lease_s is 4 to 86400, not {lease_s}")
        self.rollout_buffer = RolloutBuffer(queue_maxsize)
        self.metrics_queue: queue.Queue[Mapping[str, float]] = queue.Queue()
        self.samples_ahead = samples_ahead
        """Rows TRL has fetched beyond those it has trained, at the moment it posts a version; None: not known, 0."""
        self._client = RolloutClient(url, api_key=api_key, retry_for_s=retry_for_s, consumer=consumer)
        self._brief = RolloutClient(url, api_key=api_key, timeout_s=BRIEF_S, retry_for_s=0.0, consumer=consumer)
        self._ask: dict[str, Any] = {"max_groups": groups_per_lease, "lease_s": lease_s}
        self._given_staleness = max_staleness
        self._given_offset, self._rewind_to = version_offset, rewind_to
        self._offset: int | None = None
        """The service's versions minus TRL's; None until the first sync."""
        self._posted = 0
        """TRL's last version."""
        self._feeder: Feeder | None = None
        self._stopped = False
        self._clock = clock
        self._watch = Watch(client=self._brief, url=url, unreachable_after_s=unreachable_after_s, clock=clock)
        self._counters, self._skipped = metrics.Deltas(), metrics.Deltas()

    # what TRL calls

    def start(self) -> None:
        """Begin to lease. TRL calls it after the first sync. RuntimeError before that, or after `stop`."""
        if self._stopped:
            raise RuntimeError("this rollout worker has been stopped; make a new one for another run")
        if self._offset is None:
            raise RuntimeError("update_model_version comes before start: rows are counted in TRL's versions")
        if self._feeder is None:
            self._feeder = Feeder(
                self._brief, self.rollout_buffer, ask=self._ask, version_offset=self._offset, clock=self._clock
            )
            self._feeder.start()

    def stop(self) -> None:
        """End leasing and give back every group that was not acked. May be called again, and without a `start`.

        Never raises a `ClientError`: one may be on its way. Takes seconds, also while the service is gone; what could
        not be given back then comes back when its lease runs out.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._feeder is not None:
            self._feeder.stop()
        self._give_back(self.rollout_buffer.empty_out())
        self._brief.close()
        self._client.close()

    def update_model_version(self, model_version: int) -> None:
        """Every engine has the weights of TRL's `model_version`: ack what was trained, post it, drop what is too old.

        Raises the client's errors, `Conflict` where the service is ahead.
        """
        version = self._settle(model_version) + model_version
        self._ack()
        self._post(version)
        self._posted = model_version
        self._give_back(self.rollout_buffer.advance(version))
        self._measure()

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no rows will come any more: what the feeder's thread died of, `Halted`, `ServiceUnreachable`,
        `Exhausted`, `NoProgress`. TRL calls it every 5 s while its queue is empty."""
        if self._feeder is None:
            raise RuntimeError("the rollout worker was not started")
        if not self.rollout_buffer.empty():
            return  # a row came between
        delivered, _ = self.rollout_buffer.counts()
        spent = self.rollout_buffer.spent()
        self._watch.check(self._feeder.condition, delivered=delivered, spent=spent, stale_after_s=stale_after_s)

    # what ReloadWeightTransfer and MarkOnSave call, on TRL's thread

    def next_version(self) -> int:
        """The policy version the service will be told at the next sync. Settles the offset (and rewinds) if it is not
        settled yet."""
        return self._settle(self._posted + 1) + self._posted + 1

    def mark(self, name: str) -> None:
        """Mark this point at the service; an older mark of that name gives way."""
        try:
            self._client.create_checkpoint(name)
        except Conflict:
            logger.warning("the mark %s was there already; it now stands for this point", name)
            self._client.delete_checkpoint(name)
            self._client.create_checkpoint(name)

    def marks(self) -> list[str]:
        """The names of every mark, oldest first."""
        return [str(mark.get("name")) for mark in self._client.checkpoints()]

    def forget_mark(self, name: str) -> None:
        """Let a mark go; one that is gone already: no effect."""
        try:
            self._client.delete_checkpoint(name)
        except NotFound:
            logger.debug("the mark %s was gone already", name)

    # parts of update_model_version

    def _settle(self, first: int) -> int:
        """The offset; `first` is TRL's version that is posted next."""
        if self._offset is not None:
            return self._offset
        if self._rewind_to is not None:
            offset = int(self._client.rewind(self._rewind_to)["version"]) - (first - 1)
            now = self._client.version()
        else:
            now = self._client.version()
            offset = now.version - (first - 1) if self._given_offset is None else self._given_offset
        bound = now.max_staleness if self._given_staleness is None else self._given_staleness
        self.rollout_buffer.settle(bound)
        self._offset = offset
        return offset

    def _post(self, version: int) -> None:
        try:
            self._client.post_version(version)
        except Conflict as error:
            raise Conflict(
                f"the rollout-service is at a higher policy version than {version}, which this run would post "
                f"({error}). To go on from a mark: rewind_to=…; to count on from where the service is: neither "
                "version_offset nor rewind_to; to start over: another store.url, or the same emptied",
                type=error.type,
                status=error.status,
                facts=error.facts,
            ) from error

    def _ack(self) -> None:
        for lease_id, group_ids in self.rollout_buffer.acks_due(self.samples_ahead or 0).items():
            lost, reason = self._ack_of_lease(lease_id, group_ids)
            self.rollout_buffer.forget(lease_id, group_ids)
            if lost:
                names = ", ".join(lost)
                logger.warning(
                    "lease %s was lost before its ack; trained, but not ours: %s (%s)", lease_id, names, reason
                )

    def _ack_of_lease(self, lease_id: str, group_ids: Sequence[str]) -> tuple[list[str], ClientError | None]:
        """The groups that are no longer ours, and why: all at once, and where that is refused one by one."""
        try:
            self._client.ack(lease_id, group_ids)
            return [], None
        except (Conflict, NotFound) as error:
            reason: ClientError = error
        lost = []
        for group_id in group_ids:
            try:
                self._client.ack(lease_id, [group_id])
            except (Conflict, NotFound) as error:
                lost.append(group_id)
                reason = error
        return lost, reason

    def _give_back(self, held: Mapping[str, Sequence[str]]) -> None:
        """Release these groups; never raises a `ClientError`."""
        for lease_id, group_ids in held.items():
            try:
                self._brief.release(lease_id, group_ids)
            except (Conflict, NotFound) as error:
                logger.info("lease %s was no longer ours to give back: %s", lease_id, error)
            except ClientError as error:
                logger.warning(
                    "groups of lease %s were not given back and come back by themselves: %s", lease_id, error
                )
                if isinstance(error, ServiceUnreachable):
                    return  # nor would the others be, and each try costs seconds

    def _measure(self) -> None:
        _, skipped = self.rollout_buffer.counts()
        told = {
            "rollout/skipped_samples_total": self._skipped.of("skipped", float(skipped)),
            "rollout/buffered_samples": float(self.rollout_buffer.qsize()),
        }
        try:
            told |= metrics.of_service(self._brief.metrics(), self._counters)
        except ClientError as error:
            logger.warning("the rollout-service's metrics could not be read this time: %s", error)
        self.metrics_queue.put(told)
