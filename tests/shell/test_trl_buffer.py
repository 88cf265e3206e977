"""The queue TRL drains: bounded, and never holding a row that is no longer ours."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from trainer_client.trl.buffer import Delivery, RolloutBuffer, Row


def deliveries(*groups: tuple[str, int, int]) -> list[Delivery]:
    """Groups (id, version, rows); a row is a string here: the buffer does not look at it."""
    return [
        Delivery(group_id=name, version=version, rows=tuple(f"{name}{n}" for n in range(rows)), skipped=0)  # type: ignore[misc]  # the buffer never looks into a row
        for name, version, rows in groups
    ]


def filled(*groups: tuple[str, int, int], maxsize: int = 0, max_staleness: int = 1) -> tuple[RolloutBuffer, list[Row]]:
    buffer = RolloutBuffer(maxsize)
    buffer.settle(max_staleness)
    rows, _ = buffer.take("l1", deliveries(*groups), renew_every_s=300, now=0)
    return buffer, rows


def contents(buffer: RolloutBuffer) -> list[Any]:
    return [row.sample for row in buffer.queue]


def test_it_gives_the_samples_in_the_order_they_came():
    buffer, rows = filled(("a", 0, 2), ("b", 0, 1))
    for row in rows:
        buffer.put(row)
    assert [buffer.get() for _ in range(3)] == ["a0", "a1", "b0"]
    assert buffer.acks_due(0) == {"l1": ["a", "b"]}


def test_a_full_buffer_makes_the_feeder_wait_and_counts_rows():
    buffer, rows = filled(("a", 0, 3), maxsize=2)
    buffer.put(rows[0])
    buffer.put(rows[1])
    with pytest.raises(queue.Full):
        buffer.put(rows[2], timeout=0.01)
    buffer.get()
    buffer.put(rows[2], timeout=0.01)
    assert buffer.counts() == (3, 0)


def test_a_new_version_takes_out_what_is_too_old_and_was_not_begun():
    buffer, rows = filled(("begun", 0, 2), ("old", 0, 2), ("fresh", 1, 1))
    for row in rows:
        buffer.put(row)
    buffer.get()
    assert buffer.advance(1) == {}
    assert buffer.advance(2) == {"l1": ["old"]}
    assert contents(buffer) == ["begun1", "fresh0"]


def test_rows_of_a_group_that_was_taken_out_no_longer_enter():
    buffer, rows = filled(("old", 0, 2))
    buffer.put(rows[0])
    buffer.advance(2)
    buffer.put(rows[1])
    assert contents(buffer) == []
    assert buffer.empty()


def test_what_is_too_old_when_it_arrives_is_not_held():
    buffer, _ = filled()
    buffer.advance(5)
    rows, too_old = buffer.take("l2", deliveries(("old", 3, 1), ("good", 4, 1)), renew_every_s=300, now=0)
    assert too_old == ["old"]
    assert [row.key for row in rows] == [("l2", "good")]


def test_a_lost_lease_takes_its_rows_along_and_what_was_begun_is_still_to_be_acked():
    buffer, rows = filled(("begun", 0, 2), ("waiting", 0, 2))
    for row in rows:
        buffer.put(row)
    buffer.get()
    assert buffer.lose("l1") == ["begun", "waiting"]
    assert contents(buffer) == []
    assert buffer.acks_due(0) == {"l1": ["begun"]}


def test_room_made_by_a_new_version_wakes_a_feeder_that_waits_for_it():
    buffer, rows = filled(("old", 0, 1), ("fresh", 2, 1), maxsize=1)
    buffer.put(rows[0])
    waiter = threading.Thread(target=lambda: buffer.put(rows[1], timeout=10))
    waiter.start()
    buffer.advance(2)
    waiter.join(10)
    assert contents(buffer) == ["fresh0"]


def test_emptying_it_names_everything_that_was_not_acked():
    buffer, rows = filled(("a", 0, 1), ("b", 0, 1))
    buffer.put(rows[0])
    buffer.get()
    assert buffer.empty_out() == {"l1": ["a", "b"]}
    buffer.put(rows[1])
    assert buffer.empty()
    assert buffer.empty_out() == {}


def test_more_is_wanted_once_the_trainer_finds_it_empty():
    buffer, rows = filled(("a", 0, 1))
    buffer.put(rows[0])
    buffer.get()
    assert not buffer.wanted.is_set()
    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.01)
    assert buffer.wanted.is_set()


def test_samples_left_out_are_counted():
    buffer, _ = filled()
    buffer.take("l2", [Delivery(group_id="z", version=0, rows=(), skipped=3)], renew_every_s=300, now=0)
    assert buffer.counts() == (0, 3)
    assert buffer.acks_due(0) == {"l2": ["z"]}
