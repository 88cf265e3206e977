"""The service's counters as TRL's log sums them."""

from __future__ import annotations

from trainer_client.trl.metrics import Deltas, of_service, total


def page(failed: int, dropped: int, stale: int) -> str:
    return (
        f'# TYPE rollout_failed_total counter\nrollout_failed_total{{reason="timeout"}} {failed}.0\n'
        f'rollout_failed_total{{reason="engine error {{x}}"}} 1.0\nrollout_failed_groups_total 50.0\n'
        f'rollout_dropped_groups_total{{reason="cancelled"}} {dropped}.0\nrollout_stale_groups_total {stale}.0\n'
        'rollout_groups{state="ready"} 3.0\nrollout_groups{state="leased"} 9.0\nrollout_inflight_rollouts 128.0\n'
    )


def test_counters_are_summed_over_their_labels():
    assert total(page(2, 0, 0), "rollout_failed_total") == 3.0
    assert total(page(2, 0, 0), "rollout_nothing_total") == 0.0


def test_the_first_reading_is_the_base_and_later_ones_give_what_was_added():
    deltas = Deltas()
    first = of_service(page(2, 5, 7), deltas)
    assert [first[f"rollout/{name}"] for name in ("failed_total", "dropped_groups_total", "stale_groups_total")] == [
        0,
        0,
        0,
    ]
    second = of_service(page(4, 5, 10), deltas)
    assert [second[f"rollout/{name}"] for name in ("failed_total", "dropped_groups_total", "stale_groups_total")] == [
        2,
        0,
        3,
    ]


def test_a_restart_that_starts_the_counters_again_gives_no_negative_number():
    deltas = Deltas()
    of_service(page(9, 9, 9), deltas)
    after = of_service(page(1, 0, 2), deltas)
    assert after["rollout/failed_total"] == 2
    assert after["rollout/dropped_groups_total"] == 0
    assert after["rollout/stale_groups_total"] == 2


def test_gauges_are_given_as_they_are():
    read = of_service(page(0, 0, 0), Deltas())
    assert read["rollout/ready_groups"] == 3.0
    assert read["rollout/inflight_rollouts"] == 128.0
