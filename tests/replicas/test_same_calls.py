"""What the one writer's callers are promised holds at a replica too: its own tests, over a shared store.

The tests stand in tests/shell; those that look inside the one writer or bring a store of their own mean nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollout_service.core.shared import Overview
from rollout_service.orchestrator import Rules
from rollout_service.replicas import ReplicaOrchestrator, ReplicaSettings
from rollout_service.store import MemoryStore
from rollout_service.store.shared_memory import SharedMemory
from tests.fakes import Harness
from tests.shell import test_orchestrator

SAME = (
    "test_a_bump_aborts_the_stale_group_and_leaves_the_fresh_one_alone",
    "test_a_caller_that_hangs_up_while_waiting_takes_nothing",
    "test_a_failed_whole_group_halts_and_resume_goes_on",
    "test_a_full_queue_refuses_and_takes_nothing",
    "test_a_group_is_generated_scored_leased_and_acked",
    "test_a_group_too_old_when_it_comes_back_goes_stale",
    "test_a_late_ack_counts_while_the_group_is_ready_again_in_the_same_attempt",
    "test_a_late_answer_after_a_bump_is_never_scored_and_is_counted_as_wasted",
    "test_a_lower_version_is_a_conflict_and_a_reset_takes_leases_back",
    "test_a_partly_dispatched_group_comes_back_smaller_with_its_own_row_numbers",
    "test_a_pause_stops_dispatch_and_survives_a_restart",
    "test_a_prompts_file_is_read_as_there_is_room_and_its_end_is_the_end_of_the_run",
    "test_a_request_id_gives_the_same_lease_until_it_ends_and_a_conflict_afterwards",
    "test_a_restart_goes_on_at_the_next_row_of_the_file",
    "test_a_reward_that_cancels_drops_only_its_group_and_one_that_scores_nobody_makes_it_unscorable",
    "test_an_answer_that_was_not_delivered_is_given_back_unless_it_can_be_fetched_again",
    "test_an_empty_answer_is_not_remembered",
    "test_an_expired_lease_gives_its_groups_to_the_next_and_a_late_ack_is_a_conflict",
    "test_callers_with_one_request_id_share_one_wait_and_one_lease",
    "test_cancelling_ends_a_group_in_any_outstanding_state",
    "test_concurrent_versions_end_at_the_highest",
    "test_known_prompts_come_back_and_other_content_is_a_conflict",
    "test_min_groups_waits_and_is_met_by_what_is_left_when_nothing_more_can_come",
    "test_ready_groups_go_out_while_halted_even_fewer_than_min_groups",
    "test_renewal_extends_and_parts_can_be_acked_and_released",
    "test_requeue_generates_the_whole_prompt_again",
    "test_unknown_leases_and_groups_are_not_found_and_strangers_a_conflict",
    "test_waiting_callers_are_answered_when_the_service_ends",
    "test_waiting_callers_are_served_first_come_first_served",
    "test_waiting_callers_hear_at_once_that_the_run_is_exhausted",
)


def now(asked: Any) -> Overview:
    """What a coroutine that waits for nothing returns."""
    while True:
        try:
            asked.send(None)
        except StopIteration as done:
            overview: Overview = done.value
            return overview


class ReplicaHarness(Harness):
    """A `Harness` whose door is a replica; a store in memory stands for what several handles share."""

    shared: dict[int, tuple[MemoryStore, SharedMemory]]

    def __post_init__(self) -> None:
        _, memory = self.shared.setdefault(
            id(self.store), (self.store, SharedMemory(self.policy.group.max_staleness, self.clock))
        )
        memory.clock = self.clock
        handle, ids = memory.store(), iter(range(1, 10**9))
        door = ReplicaOrchestrator(
            Rules(policy=self.policy, scoring=self.scoring, engine_wait_s=self.engine_wait_s),
            ReplicaSettings(name="one", lease_s=1e6),
            store=handle,
            runner=self.runner,
            scorer=self.scorer,
            engines=self.engines,
            observer=self.observer,
            source=self.source,
            digest=self.digest,
            clock=self.clock,
            steady=self.clock,
            healths=lambda: (1, int(self.engines.capacity > 0)),
            new_id=lambda: f"lease-{next(ids)}-{id(self)}",
        )
        look = door.status

        def status() -> Any:
            now(door.watch.look())
            return look()

        door.status = status  # type: ignore[method-assign]  # tests look at every pass of the loop; it is a poll old
        self.door = door  # type: ignore[assignment]  # the same calls


@pytest.fixture(autouse=True)
def over_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    harness: Callable[..., Any] = type("OneRun", (ReplicaHarness,), {"shared": {}})
    monkeypatch.setattr(test_orchestrator, "Harness", harness)
    monkeypatch.setattr(MemoryStore, "reopened", staticmethod(lambda store: store))


globals().update({name: getattr(test_orchestrator, name) for name in SAME})
