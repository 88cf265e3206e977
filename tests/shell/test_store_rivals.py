"""What a replica is told that may not work beside those that are there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_service.core.shared import Replica
from rollout_service.errors import ConfigError
from rollout_service.run import agreed_rules
from rollout_service.settings import Settings
from rollout_service.settings.tables import EngineSettings, RewardSettings
from rollout_service.store.rivals import MAX_SHOWN, MAX_TOLD, check_rival, differences

ACCURACY = {"name": "accuracy", "function": "rewards:accuracy"}


def rules(**tables: Any) -> str:
    rewards = [RewardSettings(**fields) for fields in tables.pop("rewards", [ACCURACY])]
    return agreed_rules(Settings(engines=[EngineSettings()], rewards=rewards, **tables))


def refused(here: str, there: str, prompts_here: str = "", prompts_there: str = "") -> str:
    replica = Replica(replica_id="r", name="here", service="1", rules=here, prompts=prompts_here)
    with pytest.raises(ConfigError) as caught:
        check_rival(replica, name="three", rules=there, prompts=prompts_there, run="store x")
    return str(caught.value)


def test_each_difference_is_told_with_both_values():
    here = rules(groups={"max_staleness": 2}, rewards=[{"name": "a", "function": "m:a", "weight": 0.5}])
    there = rules(groups={"max_staleness": 4}, rewards=[{"name": "a", "function": "m:other"}])
    assert differences(here, there) == [
        "groups.max_staleness is 4 there and 2 here",
        "rewards[0].weight is 1.0 there and 0.5 here",
    ]
    assert refused(here, there) == (
        "store x: replica three has other rules: groups.max_staleness is 4 there and 2 here;"
        " rewards[0].weight is 1.0 there and 0.5 here; all replicas of a run need the same"
    )


def test_what_one_of_them_does_not_have_is_told_too():
    one, two = ({"name": name, "function": "m:f"} for name in ("a", "b"))
    told = differences(rules(rewards=[one]), rules(rewards=[one, two]))
    assert told == ['rewards[1].name is "b" there and not set here', "rewards[1].weight is 1.0 there and not set here"]


def test_a_message_stays_short():
    here, there = ({f"{side}{n}": side * 1000 for n in range(MAX_TOLD + 3)} for side in "ab")
    told = differences(json.dumps(here), json.dumps(there))
    assert told[MAX_TOLD:] == [f"{len(here) + len(there) - MAX_TOLD} more"]
    assert all(len(line) < 2 * MAX_SHOWN for line in told)


@pytest.mark.parametrize("other", ["", "0f3a", "7", "{"])
def test_rules_in_another_form_are_those_of_another_version(other: str):
    assert "other rules" in refused(rules(), other)


def test_the_same_rules_and_prompts_are_no_rivals():
    check_rival(
        Replica(replica_id="r", name="here", service="1", rules=rules(), prompts="p1"),
        name="three",
        rules=rules(),
        prompts="",
        run="store x",
    )
    assert refused(rules(), rules(), "p1", "p2") == "store x: replica three reads another prompts file"


def test_what_each_replica_may_have_for_itself_is_no_rule():
    alone = {"dispatch": {"max_inflight_rollouts": 7}, "server": {"port": 9999}}
    assert rules(**alone) == rules()
