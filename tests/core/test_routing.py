"""Which engine gets the next request: the one function that decides, on plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engines.routing import HOME_FACTOR, HOME_SLACK, SESSION_FACTOR, capacity, choose, load


@dataclass(kw_only=True, eq=False)
class Engine:
    """What the function sees of one."""

    usable: bool = True
    loading: bool = False
    doubtful: bool = False
    resting: bool = False
    in_flight: int = 0
    given: int = 0
    limit: int = 100
    foreign: int = 0
    pressed: bool = False

    @property
    def on_trial(self) -> bool:
        return self.doubtful and not self.in_flight and not self.resting

    @property
    def open(self) -> bool:
        return self.usable and not self.loading and self.in_flight < self.limit


def test_the_least_loaded_engine_gets_the_request_by_the_share_of_its_limit() -> None:
    small, large = Engine(in_flight=30, limit=40), Engine(in_flight=60, limit=400)
    assert choose([small, large]) is large


def test_what_others_run_there_counts_like_our_own() -> None:
    shared, ours = Engine(in_flight=5, foreign=50), Engine(in_flight=20)
    assert choose([shared, ours]) is ours


def test_between_equals_the_turn_goes_round() -> None:
    one, two = Engine(given=4), Engine(given=3)
    assert choose([one, two]) is two


def test_an_engine_whose_queue_waits_comes_after_one_whose_does_not() -> None:
    assert choose([Engine(in_flight=1, pressed=True), calm := Engine(in_flight=50)]) is calm


def test_nobody_is_chosen_where_nobody_is_open() -> None:
    assert choose([]) is None
    assert choose([Engine(usable=False)]) is None
    assert choose([Engine(in_flight=100), Engine(loading=True)]) is None


def test_the_rows_of_a_group_stay_at_its_home_until_that_is_loaded_past_the_bound() -> None:
    other = Engine(in_flight=40)
    bound = int(HOME_FACTOR * 40) + HOME_SLACK
    assert choose([other, home := Engine(in_flight=bound)], home=home) is home
    assert choose([other, home := Engine(in_flight=bound + 1)], home=home) is other


def test_a_whole_group_stays_together_on_an_empty_fleet() -> None:
    engines = [Engine(), Engine()]
    home = engines[0]
    for _ in range(HOME_SLACK):
        chosen = choose(engines, home=home)
        assert chosen is home
        home.in_flight += 1


def test_a_rollout_of_many_turns_stays_longer_than_a_group_does() -> None:
    other = Engine(in_flight=40)
    session, home = Engine(in_flight=int(SESSION_FACTOR * 40)), Engine(in_flight=41)
    assert choose([other, session, home], session=session, home=home) is session
    session.in_flight = int(SESSION_FACTOR * 40) + HOME_SLACK + 1
    assert choose([other, session, home], session=session, home=home) is home


def test_a_home_that_is_full_out_doubtful_or_pressed_is_left() -> None:
    other = Engine(in_flight=40)
    for home in (
        Engine(in_flight=10, limit=10),
        Engine(usable=False),
        Engine(loading=True),
        Engine(doubtful=True, in_flight=1),
        Engine(pressed=True),
    ):
        assert choose([other, home], home=home) is other
    assert choose([replace(other, pressed=True), home := Engine(pressed=True)], home=home) is home


def test_a_home_that_is_no_candidate_is_not_chosen() -> None:
    """One whose context is too short for the request, or that has left the fleet."""
    assert choose([other := Engine(in_flight=40)], home=Engine()) is other
    assert choose([other, Engine(in_flight=50)], session=Engine()) is other


def test_a_retry_goes_elsewhere_and_back_only_where_there_is_nothing_else() -> None:
    failed, other = Engine(), Engine(in_flight=99)
    assert choose([failed, other], home=failed, session=failed, avoid=failed) is other
    other.in_flight = 100
    assert choose([failed, other], avoid=failed) is failed


def test_a_doubtful_engine_gets_one_request_at_a_time_while_another_is_sure() -> None:
    doubtful, sure = Engine(doubtful=True), Engine(in_flight=10)
    assert choose([doubtful, sure]) is doubtful, "one request finds out"
    doubtful.resting = True
    assert choose([doubtful, sure]) is sure, "not before its time"
    doubtful.resting, doubtful.in_flight = False, 1
    assert choose([doubtful, sure]) is sure, "and not a second one"
    sure.in_flight = 100
    assert choose([doubtful, sure]) is None, "what finds no room elsewhere waits"
    sure.usable = False
    assert choose([doubtful, sure]) is doubtful, "with nobody sure it takes what it can"


def test_the_capacity_counts_a_doubtful_engine_with_what_it_has_while_another_is_sure() -> None:
    sure, doubtful, out = Engine(), Engine(doubtful=True), Engine(usable=False)
    assert capacity([sure, doubtful, out]) == 101
    assert capacity([sure, replace(doubtful, in_flight=7)]) == 107
    assert capacity([sure, replace(doubtful, resting=True)]) == 100
    assert capacity([doubtful, replace(doubtful)]) == 200
    assert capacity([]) == 0


engines = st.builds(
    Engine,
    usable=st.booleans(),
    loading=st.booleans(),
    doubtful=st.booleans(),
    resting=st.booleans(),
    in_flight=st.integers(0, 12),
    given=st.integers(0, 50),
    limit=st.integers(1, 12),
    foreign=st.integers(0, 12),
    pressed=st.booleans(),
)


@given(st.lists(engines, max_size=6), st.data())
def test_whatever_the_fleet_looks_like(fleet: list[Engine], data: st.DataObject) -> None:
    one = st.none() | (st.sampled_from(fleet) if fleet else st.nothing())
    session, home, avoid = (data.draw(one) for _ in range(3))
    chosen = choose(fleet, session=session, home=home, avoid=avoid)
    opened = [engine for engine in fleet if engine.open]
    sure = any(engine.usable and not engine.doubtful for engine in fleet)
    if chosen is None:
        assert all(sure and engine.doubtful and not engine.on_trial for engine in opened)
        return
    assert chosen.open
    if len(fleet) > 1:
        able = [engine for engine in opened if engine.on_trial or not (sure and engine.doubtful)]
        assert chosen in able
        assert chosen is not avoid or able == [avoid]
        if chosen not in (session, home):
            better = [e for e in able if e is not avoid and (e.pressed, load(e)) < (chosen.pressed, load(chosen))]
            assert not better or chosen is avoid
