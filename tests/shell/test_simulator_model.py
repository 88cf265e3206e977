"""The simulator's pure part: the batch, and what a completion will be."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_service.simulator import Lengths, SimulatorSettings
from rollout_service.simulator import __all__ as exported
from rollout_service.simulator.content import EOS, Content, scripted_ring
from rollout_service.simulator.decoder import Decoder
from rollout_service.simulator.model import BatchModel, Sequence, batch_rate, fixed_rate

# -- the batch, on its own


def started_batch(count: int, *, tokens: int = 100, limit: int | None = None) -> tuple[BatchModel[Sequence], list]:
    batch: BatchModel[Sequence] = BatchModel(rate=batch_rate(600.0, 16.0), limit=limit)
    sequences = [Sequence(tokens, float(tokens)) for _ in range(count)]
    for sequence in sequences:
        batch.add(0.0, sequence)
    return batch, sequences


@pytest.mark.parametrize(("count", "tokens_per_s"), [(1, 600.0), (17, 300.0), (33, 200.0)])
def test_each_request_decodes_at_the_documented_rate_of_the_batch(count: int, tokens_per_s: float) -> None:
    batch, sequences = started_batch(count, tokens=600)
    assert batch.next_due() == pytest.approx(600 / tokens_per_s)
    assert batch.decoded(0.5, sequences[0]) == tokens_per_s // 2


def test_a_bigger_batch_makes_more_tokens_in_all() -> None:
    rate = batch_rate(600.0, 16.0)
    totals = [n * rate(n) for n in range(1, 500)]
    assert totals == sorted(totals)
    assert totals[-1] < 600.0 * 16.0


def test_a_request_that_leaves_keeps_its_tokens_and_speeds_the_others_up() -> None:
    batch, (first, second) = started_batch(2, tokens=600)
    alone, together = 600.0, batch_rate(600.0, 16.0)(2)
    batch.remove(0.5, first)
    assert first.decoded == int(0.5 * together)
    assert batch.next_due() == pytest.approx(0.5 + (600 - 0.5 * together) / alone)
    assert batch.decoded(0.6, first) == first.decoded
    assert not batch.remove(0.7, first)
    assert batch.due(5.0) == [second]


def test_the_batch_takes_no_more_than_its_limit_and_the_rest_in_order() -> None:
    batch, sequences = started_batch(5, tokens=60, limit=2)
    assert (batch.running, batch.waiting) == (2, 3)
    batch.remove(0.0, sequences[2])
    batch.remove(0.0, sequences[0])
    assert [s.stage for s in sequences] == ["ended", "running", "ended", "running", "waiting"]


def test_a_frozen_batch_stands_still_and_goes_on_where_it_was() -> None:
    batch, (sequence,) = started_batch(1, tokens=600)
    batch.close(0.5, freeze=True)
    late = Sequence(10, 10.0)
    batch.add(1.0, late)
    assert batch.next_due() is None
    assert batch.due(100.0) == []
    assert (batch.decoded(100.0, sequence), late.stage) == (300, "waiting")
    batch.open(100.0)
    assert batch.decoded(100.1, sequence) > 300
    assert late.stage == "running"


def test_a_closed_batch_that_is_not_frozen_runs_empty() -> None:
    batch, (sequence,) = started_batch(1, tokens=600)
    batch.close(0.5, freeze=False)
    batch.add(0.5, Sequence(10, 10.0))
    assert batch.due(1.0) == [sequence]
    assert (batch.running, batch.waiting) == (0, 1)


def test_a_fixed_latency_does_not_depend_on_the_batch() -> None:
    batch: BatchModel[Sequence] = BatchModel(rate=fixed_rate, limit=None)
    sequences = [Sequence(64, 2.0) for _ in range(1000)]
    for at, sequence in enumerate(sequences):
        batch.add(at / 1000, sequence)
    assert batch.next_due() == pytest.approx(2.0)
    assert len(batch.due(2.4)) == 402  # those that came in the first 0.401 s: timers are a millisecond coarse
    assert batch.decoded(2.5, sequences[999]) == int(64 * 1.501 / 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["add", "remove", "tick", "freeze", "close", "open"]), max_size=60), st.randoms())
def test_whatever_happens_nobody_waits_beside_a_free_place(steps: list[str], random: Any) -> None:
    batch: BatchModel[Sequence] = BatchModel(rate=batch_rate(100.0, 4.0), limit=3)
    alive: list[Sequence] = []
    now, closed = 0.0, False
    for step in steps:
        now += random.random() / 10
        if step == "add":
            alive.append(Sequence(tokens := random.randint(1, 20), float(tokens)))
            batch.add(now, alive[-1])
        elif step == "remove" and alive:
            gone = alive.pop(random.randrange(len(alive)))
            assert batch.remove(now, gone)
            assert 0 <= gone.decoded <= gone.tokens
        elif step == "tick":
            for done in batch.due(now):
                alive.remove(done)
                assert done.decoded == done.tokens
        elif step in ("freeze", "close"):
            batch.close(now, freeze=step == "freeze")
            closed = True
        elif step == "open":
            batch.open(now)
            closed = False
        assert batch.running + batch.waiting == len(alive)
        assert batch.running <= 3
        assert closed or not batch.waiting or batch.running == 3
        assert set(batch.sequences()) == set(alive)


# -- what a completion will be


def test_a_completion_cut_anywhere_is_the_same_tokens() -> None:
    content = Decoder(SimulatorSettings(lengths=Lengths.FIXED, mean_tokens=97)).plan("key", 200).content
    ring = content.ring
    whole = json.loads(b"[%b]" % content.fragments((ring.ids,), 0, 97)[0])
    assert len(whole) == 97
    assert whole[-1] == EOS
    assert content.raw(0, 97) == bytes(whole[:-1])
    for cut in (0, 1, 47, 48, 49, 96, 97):
        pieces = [content.fragments((ring.ids,), *span)[0] for span in ((0, cut), (cut, 97))]
        assert [i for piece in pieces for i in json.loads(b"[%b]" % piece)] == whole
        offsets = content.text_offsets(0, cut)
        assert len(offsets) == cut
        assert content.text_offsets(0, 97)[:cut] == offsets


def test_a_completion_longer_than_the_ring_goes_round_it() -> None:
    ring = scripted_ring("abcdefg")
    content = Content(ring, 5, 2, 20, 41, True)
    walk = bytes((b"abcdefg" * 9)[5:25] + (b"abcdefg" * 9)[2:22])
    assert content.raw(0, 41) == walk
    assert json.loads(b"[%b]" % content.fragments((ring.ids,), 0, 41)[0]) == [*walk, EOS]
    assert content.raw(13, 30) == walk[13:30]
    assert content.raw(25, 30) == walk[25:30]


def test_half_a_character_has_an_empty_token_string() -> None:
    ring = scripted_ring("aü")
    assert json.loads(b"[%b]" % Content.whole(ring).fragments((ring.strings,), 0, 4)[0]) == ["a", "", "ü", "<eos>"]


def test_lengths_follow_their_distribution_and_end_at_the_limit() -> None:
    for lengths in Lengths:
        decoder = Decoder(SimulatorSettings(lengths=lengths, mean_tokens=100, sigma=0.8))
        plans = [decoder.plan(f"key{i}", 4000) for i in range(3000)]
        mean = sum(plan.content.length for plan in plans) / len(plans)
        assert mean == pytest.approx(100, rel=0.08), lengths
        cut = [decoder.plan(f"key{i}", 50) for i in range(300)]
        assert max(plan.content.length for plan in cut) == 50
        assert {plan.finish_reason for plan in cut} <= {"stop", "length"}
        for plan in cut:
            last = json.loads(b"[%b]" % plan.content.fragments((plan.content.ring.ids,), 0, plan.content.length)[0])[-1]
            assert plan.finish_reason == ("stop" if last == EOS else "length")


def test_a_long_tail_is_longer_than_its_mean_promises() -> None:
    decoder = Decoder(SimulatorSettings(mean_tokens=100, sigma=0.8))
    lengths = sorted(decoder.plan(f"key{i}", 4000).content.length for i in range(3000))
    assert lengths[len(lengths) // 2] < 85
    assert lengths[-30] > 400


def test_min_tokens_and_ignore_eos_are_kept() -> None:
    decoder = Decoder(SimulatorSettings(lengths=Lengths.FIXED, mean_tokens=5))
    assert decoder.plan("key", 100, 20).content.length == 20
    ignoring = decoder.plan("key", 100, 0, True)
    assert (ignoring.content.length, ignoring.finish_reason) == (100, "length")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens_per_s": 0}, "tokens_per_s"),
        ({"latency": -1.0}, "latency"),
        ({"jitter": 0.5}, "jitter"),
        ({"port": 70000}, "port"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"mean_tokens": float("nan")}, "mean_tokens"),
        ({"seed": True}, "seed"),
        ({"model": ""}, "model"),
        ({"lengths": "gaussian"}, "gaussian"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimulatorSettings(**fields)


def test_the_door_is_what_it_says() -> None:
    import rollout_service.simulator as door

    assert sorted(exported) == exported
    assert all(hasattr(door, name) for name in exported)
