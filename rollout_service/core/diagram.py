"""The life of a group as a picture, drawn from the transition table and from nothing else."""

from __future__ import annotations

from rollout_service.core.lifecycle import TRANSITIONS, EventKind
from rollout_service.core.model import GroupState


def mermaid() -> str:
    """A Mermaid state diagram: one arrow a pair of states, its label the events that may lead there."""
    arrows: dict[tuple[GroupState, GroupState], list[EventKind]] = {}
    for (state, kind), targets in TRANSITIONS.items():
        for target in targets:
            if target is not state:
                arrows.setdefault((state, target), []).append(kind)
    order = list(GroupState)
    lines = ["stateDiagram-v2", f"    [*] --> {GroupState.PENDING}"]
    for source, target in sorted(arrows, key=lambda pair: (order.index(pair[0]), order.index(pair[1]))):
        kinds = sorted(arrows[source, target], key=list(EventKind).index)
        lines.append(f"    {source} --> {target}: {', '.join(kinds)}")
    lines += [f"    {state} --> [*]" for state in order if state.terminal]
    return "\n".join(lines)
