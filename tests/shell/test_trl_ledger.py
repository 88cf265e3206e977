"""What a group must have gone through before it is acked, dropped or forgotten."""

from __future__ import annotations

from trainer_client.trl.ledger import Ledger

A, B, C = ("l1", "a"), ("l1", "b"), ("l2", "c")


def ledger(*rows: tuple[tuple[str, str], int, int]) -> Ledger:
    """A ledger of groups (key, version, rows), whose leases are renewed every 10 s from 0."""
    made = Ledger()
    for key, version, count in rows:
        made.opened(key[0], renew_every_s=10, now=0)
        made.take(key, version=version, rows=count)
    return made


def leave(made: Ledger, *keys: tuple[str, str]) -> None:
    for key in keys:
        made.left(key)


def test_a_group_is_due_when_its_last_row_has_left():
    made = ledger((A, 1, 2), (B, 1, 2), (C, 1, 1))
    leave(made, A, A, B)
    assert made.due(0) == {"l1": ["a"]}
    leave(made, B, C)
    assert made.due(0) == {"l1": ["a", "b"], "l2": ["c"]}


def test_rows_fetched_ahead_are_not_trained_yet():
    made = ledger((A, 1, 2), (B, 1, 2), (C, 1, 2))
    leave(made, A, A, B, B)
    assert made.due(2) == {"l1": ["a"]}
    assert made.due(3) == {}
    leave(made, C, C)
    assert made.due(2) == {"l1": ["a", "b"]}


def test_a_group_without_rows_is_due_at_once():
    assert ledger((A, 1, 0)).due(0) == {"l1": ["a"]}
    assert ledger((A, 1, 0)).due(64) == {"l1": ["a"]}


def test_a_forgotten_group_is_due_no_more_and_takes_no_rows():
    made = ledger((A, 1, 1), (B, 1, 1))
    leave(made, A)
    made.forget([A, B])
    assert made.due(0) == made.held() == {}
    assert not made.holds(B)


def test_only_groups_the_trainer_has_not_begun_are_too_old():
    made = ledger((A, 1, 2), (B, 1, 2), (C, 2, 2))
    leave(made, A)
    assert made.too_old(3, 1) == [B]
    assert made.too_old(2, 1) == []
    assert made.too_old(4, 1) == [B, C]


def test_a_lost_lease_forgets_what_was_not_begun_and_completes_what_was():
    made = ledger((A, 1, 2), (B, 1, 2), (C, 1, 2))
    leave(made, A)
    assert made.lost("l1") == ["a", "b"]
    assert [made.holds(key) for key in (A, B, C)] == [False, False, True]
    assert made.due(0) == {"l1": ["a"]}
    assert made.renewals_due(100) == ["l2"]


def test_the_same_group_of_another_lease_is_another_entry():
    again = ("l9", "a")
    made = ledger((A, 1, 1), (again, 1, 1))
    leave(made, again)
    assert made.due(0) == {"l9": ["a"]}
    assert made.holds(A)


def test_leases_are_due_for_renewal_while_they_hold_something():
    made = ledger((A, 1, 1), (C, 1, 1))
    assert made.renewals_due(9.9) == []
    assert made.renewals_due(10) == ["l1", "l2"]
    made.renewed("l1", now=10)
    made.renewed("l2", now=10, again_in_s=1)
    assert made.renewals_due(11) == ["l2"]
    made.forget([C])
    assert made.renewals_due(20) == ["l1"]


def test_groups_wholly_at_the_trainer_are_spent():
    made = ledger((A, 1, 2), (B, 1, 1), (C, 1, 0))
    leave(made, A, B)
    assert made.spent() == 2
