"""What a trainer has seen of a service that is killed again and again, and what must hold of it.

What always holds: an entry under `acked` is an ack whose 200 was seen; a fact that must never change is asserted when
it is seen again. What the proof counts, lost and duplicated groups, is collected instead, so that it can be reported.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.service import OUTSTANDING, TERMINAL

Json = dict[str, Any]
Attempt = tuple[str, int, int]
"""(group id, attempt, row)."""


@dataclass(kw_only=True)
class History:
    """Of one run over all its kills."""

    max_staleness: int
    late: bool = False
    """A call whose answer was lost may still be carried out after its repetition was answered."""
    version: int = 0
    """The highest one known to be committed."""
    paused: bool | None = False
    """None: a pause or resume is under way."""
    pauses: int = 0
    """Of them, how many were begun."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Prompt -> group, as answered with 202."""
    leases: dict[str, frozenset[str]] = field(default_factory=dict)
    """Lease -> groups it was first seen with."""
    content: dict[tuple[str, int], str] = field(default_factory=dict)
    """(group, attempt) -> digest of what was delivered."""
    acked: dict[str, float] = field(default_factory=dict)
    """Group -> Unix seconds when its 200 was here."""
    acked_by: dict[str, str] = field(default_factory=dict)
    """Group -> the lease of that."""
    asked: set[str] = field(default_factory=set)
    """Groups an ack was tried for."""
    ended: dict[str, str] = field(default_factory=dict)
    """Group -> the terminal state it was seen in."""
    deliveries: Counter[str] = field(default_factory=Counter)
    """Group -> leases it was seen in."""
    replays: int = 0
    """Leases seen again, asked for by their `request_id`."""
    duplicated: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def submitted(self, answer: Json) -> None:
        for entry in answer["groups"]:
            known = self.prompts.setdefault(entry["prompt_id"], entry["group_id"])
            assert known == entry["group_id"], f"{entry['prompt_id']} was {known} and is {entry['group_id']} now"

    def leased(self, lease: Json, lease_s: int, version_when_asked: int) -> None:
        """A lease with groups arrived."""
        lease_id, groups = lease["lease_id"], frozenset(group["group_id"] for group in lease["groups"])
        made_at = datetime.fromisoformat(lease["expires_at"]).timestamp() - lease_s
        new = lease_id not in self.leases
        if new:
            self.leases[lease_id] = groups
            assert lease["policy_version"] >= version_when_asked, "a new lease knows a version committed before it"
        else:
            self.replays += 1
            assert groups <= self.leases[lease_id], f"lease {lease_id} was made with {self.leases[lease_id]}: {groups}"
        for group in lease["groups"]:
            name, attempt = group["group_id"], group["attempt"]
            assert 0 <= group["staleness"] <= self.max_staleness, f"{name} was leased at {group['staleness']}"
            assert group["staleness"] == lease["policy_version"] - group["policy_version"]
            digest = _digest(group)
            known = self.content.setdefault((name, attempt), digest)
            assert known == digest, f"{name} came back in attempt {attempt} with other content"
            if new:
                self.deliveries[name] += 1
                if made_at > self.acked.get(name, float("inf")):
                    self.duplicated.append(name)

    def acking(self, group_ids: Iterable[str]) -> None:
        """An ack is tried."""
        self.asked.update(group_ids)

    def confirmed(self, lease_id: str, group_ids: Iterable[str]) -> None:
        """The 200 of an ack arrived."""
        now = time.time()
        for group_id in group_ids:
            self.acked.setdefault(group_id, now)
            if self.acked_by.setdefault(group_id, lease_id) != lease_id:
                self.duplicated.append(group_id)

    def versioned(self, version: int, when_asked: int) -> None:
        """`version` was answered to a call made when `when_asked` was known."""
        assert version >= when_asked, f"the version fell from {when_asked} to {version}"
        self.version = max(self.version, version)

    def known(self) -> tuple[int, int, bool | None, int]:
        """What an answer to a call made now may not contradict."""
        return self.version, len(self.prompts), self.paused, self.pauses

    def looked(self, known: tuple[int, int, bool | None, int], status: Json) -> None:
        """`status` was answered to a call made when `known` was known."""
        version, prompts, paused, pauses = known
        check_identity(status)
        self.versioned(status["policy_version"], version)
        assert status["submitted"] >= prompts
        if paused is not None and pauses == self.pauses:
            assert status["paused"] is paused, "a pause lasts until it is resumed"

    def listed(self, groups: Iterable[Json]) -> None:
        """All groups there are; terminal ones stay what they are."""
        for group in groups:
            if group["state"] in TERMINAL:
                known = self.ended.setdefault(group["group_id"], group["state"])
                assert known == group["state"], f"{group['group_id']} ended as {known}, then as {group['state']}"

    def finished(self, status: Json, groups: list[Json]) -> Counter[str]:
        """All is over: every prompt ended once, and the acked ones are exactly those the trainer knows of."""
        states = {group["group_id"]: group["state"] for group in groups}
        self.lost += [prompt for prompt, group in self.prompts.items() if states.get(group) not in TERMINAL]
        self.lost += [group for group in self.acked if states.get(group) != "acked"]
        assert sorted(states) == sorted(self.prompts.values()), "exactly the prompts that were submitted"
        by_state = Counter(states.values())
        counted: Mapping[str, int] = status["groups"]
        assert {state: n for state, n in counted.items() if n} == by_state, "counters agree with the groups"
        acked = {group for group, state in states.items() if state == "acked"}
        unseen = self.asked if self.late else set()
        assert acked - unseen <= set(self.acked) <= acked, f"acked by nobody, or not kept: {acked ^ set(self.acked)}"
        assert all(self.deliveries[group] for group in acked), "an acked group was delivered"
        return by_state


def check_identity(status: Json) -> None:
    """Design section 3, both sides."""
    counts = status["groups"]
    assert status["submitted"] == sum(counts[state] for state in OUTSTANDING + TERMINAL), status
    assert status["outstanding"] == sum(counts[state] for state in OUTSTANDING), status
    slots = status["slots"]
    assert 0 <= slots["used"] == slots["total"] - slots["free"], slots


def _digest(group: Json) -> str:
    """Of everything but what depends on when it was leased."""
    content = {name: value for name, value in group.items() if name != "staleness"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
