"""Samples divided among ranks and micro-batches: all of them, within the budget, evenly, and the loss unchanged."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client_script import group, sample
from trainer_client import Group, Lease, LeaseStatus, Sample

torch = pytest.importorskip("torch", reason="trainer_client.tensors needs torch (extra `torch`)")

from trainer_client.tensors import micro_batches, pack, shard, to_tensors, trained_tokens  # noqa: E402  (imports torch)

steps = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=8)


def step(*lengths_of: list[int]) -> list[Group]:
    """A group for each list, with a sample of each length; at most half of a sample is prompt."""
    made = []
    for number, lengths in enumerate(lengths_of):
        rows = [
            sample(index, prompt=length // 2, completion=length - length // 2) for index, length in enumerate(lengths)
        ]
        made.append(msgspec.convert(group(f"g{number}", samples=rows), Group))
    return made


def alone(lengths: list[int]) -> list[Sample]:
    return step(lengths)[0].samples


def sizes(micro: list[Any]) -> list[int]:
    samples = [s for item in micro for s in (item.samples if isinstance(item, Group) else [item])]
    return [len(s.input_ids) for s in samples]


def cost(micro: list[Any]) -> int:
    return sum(length * length for length in sizes(micro))


@given(steps, st.integers(40, 200), st.integers(1, 5), st.sampled_from([0, 7, 600]))
def test_every_sample_is_in_one_micro_batch_within_the_budget_and_ranks_have_as_many(lengths, budget, world, linear):
    groups = step(*lengths)
    ranks = micro_batches(groups, budget, world=world, linear=linear)
    assert len(ranks) == world
    assert len({len(mine) for mine in ranks}) == 1
    every = [micro for mine in ranks for micro in mine]
    found = [(g.group_id, s.index) for micro in every for g in micro for s in g.samples]
    assert sorted(found) == sorted((g.group_id, s.index) for g in groups for s in g.samples)
    assert all(sum(sizes(micro)) <= budget for micro in every)
    if len(found) >= len(every):
        assert all(every)
    for micro in every:  # in the order of the step, and no group twice
        order = [(g.group_id, s.index) for g in micro for s in g.samples]
        assert order == sorted(order)
        assert len({g.group_id for g in micro}) == len(micro)


@given(steps, st.integers(40, 200), st.integers(1, 4))
def test_the_same_samples_are_divided_the_same_way_on_every_rank(lengths, budget, world):
    assert micro_batches(step(*lengths), budget, world=world) == micro_batches(step(*lengths), budget, world=world)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_where_the_budget_does_not_bind_the_heaviest_is_within_four_thirds_of_the_best_possible(lengths, world):
    ranks = micro_batches(alone(lengths), 10_000, world=world)
    assert [len(mine) for mine in ranks] == [1] * world
    best = min(
        max(sum(length**2 for length, at in zip(lengths, places, strict=True) if at == rank) for rank in range(world))
        for places in itertools.product(range(world), repeat=len(lengths))
    )
    assert max(cost(mine[0]) for mine in ranks) <= (Fraction(4, 3) - Fraction(1, 3 * world)) * best


def test_ranks_cost_about_the_same_where_shares_of_groups_do_not():
    """Long groups first, as a curriculum has them: by groups one rank would get most of the attention."""
    groups = step(*([400 - 40 * n] * 8 for n in range(8)))
    by_groups = [sum(cost([g]) for g in shard(groups, rank, 4)) for rank in range(4)]
    ranks = micro_batches(groups, 1600, world=4)
    balanced = [sum(cost(micro) for micro in mine) for mine in ranks]
    assert max(by_groups) / min(by_groups) > 1.5
    assert max(balanced) / min(balanced) < 1.05
    together = [[cost(mine[i]) for mine in ranks] for i in range(len(ranks[0]))]
    assert all(max(costs) / min(costs) < 1.25 for costs in together)


def test_the_heavier_micro_batches_do_not_all_go_to_one_rank():
    """Each sample is a micro-batch here: in every pair one rank gets the longer one, in turn."""
    first, second = micro_batches(alone(list(range(40, 20, -1))), 40, world=2)
    assert len(first) == len(second) == 10
    assert abs(sum(map(cost, first)) - sum(map(cost, second))) <= 40**2 - 39**2


def test_there_are_as_few_micro_batches_as_needed():
    assert [len(mine) for mine in micro_batches(alone([10] * 8), 40, world=2)] == [1, 1]
    assert [len(mine) for mine in micro_batches(alone([21] * 6), 40, world=2)] == [3, 3]
    assert len(micro_batches(alone([40] * 3 + [1] * 40), 40)[0]) == 4


def test_a_thousand_long_samples_on_sixty_four_ranks_are_divided():
    ranks = micro_batches(alone([200 + 7919 * n % 4096 for n in range(1024)]), 8192, world=64)
    costs = [sum(cost(micro) for micro in mine) for mine in ranks]
    assert max(costs) / min(costs) < 1.1


def test_with_fewer_samples_than_ranks_the_rest_is_empty_and_still_there():
    assert sorted(map(sizes, (mine[0] for mine in micro_batches(alone([3, 5]), 10, world=3)))) == [[], [3], [5]]


def test_samples_given_alone_come_back_alone():
    samples = alone([3, 5, 4])
    (mine,) = micro_batches(samples, 12)
    assert mine == [samples]


def test_the_linear_term_weighs_tokens_beside_attention():
    samples = alone([10, 5, 5, 5, 5])
    assert [sorted(sizes(mine[0])) for mine in micro_batches(samples, 100, world=2)] == [[10], [5, 5, 5, 5]]
    by_tokens = micro_batches(samples, 100, world=2, linear=10_000)
    assert sorted(sum(sizes(mine[0])) for mine in by_tokens) == [15, 15]


def test_a_sample_over_the_budget_is_named_and_nothing_is_dropped():
    with pytest.raises(ValueError, match="group g1, sample 2: 9 tokens are more than the token_budget of 8"):
        micro_batches(step([3], [8, 4, 9]), 8)


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"world": 0}, {"linear": -1}])
def test_arguments_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValueError, match="at least"):
        micro_batches(alone([3]), **{"token_budget": 8, **wrong})


def test_no_samples_are_a_clear_error():
    with pytest.raises(ValueError, match="no samples"):
        micro_batches([], 8)


def test_a_share_is_every_world_th_group():
    groups = step([1], [2], [3], [4], [5])
    lease = Lease(status=LeaseStatus.OK, policy_version=0, groups=groups)
    assert [g.group_id for g in shard(lease, 1, 2)] == ["g1", "g3"]
    assert [[g.group_id for g in shard(groups, rank, 3)] for rank in range(3)] == [["g0", "g3"], ["g1", "g4"], ["g2"]]
    assert shard(groups[:1], 2, 3) == []


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank, world):
    with pytest.raises(ValueError, match="rank"):
        shard([], rank, world)


@pytest.mark.parametrize("world", [1, 3])
def test_micro_batch_losses_over_the_trained_tokens_of_the_step_add_up_to_the_whole_batch(world):
    """Value and gradient, with a policy whose logits depend on the token before: the token mean of the step."""
    groups = step([9, 4, 30], [2, 17, 6], [25, 11, 3], [28, 8], [19, 22])
    torch.manual_seed(0)
    table = torch.randn(300, 300, dtype=torch.float64, requires_grad=True)

    def gain(batch: Any, advantages: Any) -> Any:
        log_probs = table[batch["input_ids"]][:, :-1].log_softmax(-1)
        log_probs = log_probs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        mask = batch["completion_mask"][:, 1:]
        ratio = ((log_probs - batch["old_log_probs"][:, 1:]) * mask).exp()
        return (ratio * advantages * mask).sum()

    whole = to_tensors(groups, 0)
    loss = -gain(whole, whole["advantages"][:, None]) / whole["completion_mask"][:, 1:].sum()
    (wanted,) = torch.autograd.grad(loss, table)

    denominator = trained_tokens(groups)
    ranks = micro_batches(groups, 40, world=world)
    assert len(ranks[0]) > 1
    total, table.grad = 0.0, None
    for micro in itertools.chain(*ranks):
        batch = pack(micro)
        part = -gain(batch, batch["token_advantages"][:, 1:]) / denominator
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(table.grad, wanted, rtol=1e-9, atol=1e-12)


def test_trained_tokens_are_those_with_a_loss():
    assert trained_tokens(step([4, 1], [2])) == 2 + 0 + 1  # a sample of one token has nothing that predicts it
    assert trained_tokens(alone([4, 5])) == 2 + 3
    assert trained_tokens([]) == 0
