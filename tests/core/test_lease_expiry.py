"""When leases expire: kept in order, without a look at each of them."""

from __future__ import annotations

from rollout_service.core.group import Group
from rollout_service.core.model import GroupState
from rollout_service.core.scheduler import Policy, Scheduler


def scheduler(ready: int) -> Scheduler:
    """With `ready` scored groups."""
    made = Scheduler(Policy(slots=10_000, max_ready_groups=10_000))
    made.submit(
        Group(seq=seq, prompt_id=f"p{seq}", epoch=0, num_generations=2, waiting=(0, 1), submitted_at=0, changed_at=0)
        for seq in range(1, ready + 1)
    )
    made.dispatch(now=0, capacity=10_000)
    for seq in range(1, ready + 1):
        for row in (0, 1):
            assert made.finish(seq, 1, row, 10, now=0)
        assert made.scored(seq, 1, None, now=0)
    return made


def lease(made: Scheduler, name: str, *, now: float, lease_s: int) -> None:
    assert made.lease(name, max_groups=1, min_groups=1, lease_s=lease_s, now=now) is not None


def test_leases_expire_in_the_order_of_their_times_whatever_order_they_were_made_in() -> None:
    made = scheduler(3)
    for name, seconds in (("late", 90), ("soon", 10), ("middle", 50)):
        lease(made, name, now=0, lease_s=seconds)
    assert made.next_expiry() == 10
    made.expire(now=10)
    assert set(made.leases) == {"late", "middle"}
    assert made.next_expiry() == 50
    made.expire(now=89.9)
    assert set(made.leases) == {"late"}
    made.expire(now=1000)
    assert made.next_expiry() is None
    assert made.counts.groups[GroupState.READY] == 3


def test_a_renewed_lease_expires_at_its_new_time_only() -> None:
    made = scheduler(1)
    lease(made, "one", now=0, lease_s=10)
    for now in (5, 5, 6):
        made.renew("one", 60, now=now)
    made.expire(now=12)
    assert "one" in made.leases
    assert made.next_expiry() == 66
    made.expire(now=66)
    assert not made.leases
    assert made.next_expiry() is None


def test_what_is_kept_of_leases_does_not_grow_with_those_that_ended() -> None:
    made = scheduler(1)
    for number in range(5_000):
        name = f"lease {number}"
        lease(made, name, now=number, lease_s=86_400)
        made.release(name, None, now=number)
        made.take_changes()
    assert len(made._expiries) < 200  # what it must not grow is inside
    assert made.next_expiry() is None
