"""The run that a configuration describes: its rules in the core's words, and who keeps it.

What always holds: replicas agree on `agreed_rules`, because each judges groups that others opened.
"""

from __future__ import annotations

import json
import socket

from rollout_service import __version__
from rollout_service.core.advantages import AdvantageMethod
from rollout_service.core.group import GroupPolicy, OnStale
from rollout_service.core.scheduler import Admission, Policy
from rollout_service.core.scoring import ScoringRules, ZeroVariance
from rollout_service.engines import Fleet
from rollout_service.orchestrator import Orchestrator, RolloutRunner, Rules
from rollout_service.orchestrator.parts import Observer, Scorer
from rollout_service.prompts import PromptFile, content_digest
from rollout_service.replicas import ReplicaOrchestrator, ReplicaSettings
from rollout_service.settings import Settings
from rollout_service.store import open_shared_store, open_store


def make_orchestrator(
    settings: Settings,
    *,
    runner: RolloutRunner,
    scorer: Scorer,
    fleet: Fleet,
    observer: Observer,
    source: PromptFile | None,
) -> Orchestrator | ReplicaOrchestrator:
    """The one writer of a run, or one of the replicas that share it. Raises ConfigError."""
    digest = content_digest if source is not None else None
    store = settings.store
    if not store.shared:
        return Orchestrator(
            rules(settings),
            store=open_store(store.url, max_staleness=settings.groups.max_staleness),
            runner=runner,
            scorer=scorer,
            engines=fleet,
            observer=observer,
            source=source,
            digest=digest,
        )
    return ReplicaOrchestrator(
        rules(settings),
        ReplicaSettings(
            name=settings.replica.name or f"{socket.gethostname()}:{settings.server.port}",
            lease_s=settings.replica.lease_s,
            service=__version__,
            rules=agreed_rules(settings),
        ),
        store=open_shared_store(
            store.url,
            max_staleness=settings.groups.max_staleness,
            pool_size=store.pool_size,
            statement_timeout_s=store.statement_timeout_s,
        ),
        runner=runner,
        scorer=scorer,
        engines=fleet,
        observer=observer,
        healths=lambda: engine_counts(fleet),
        fleet=fleet,
        source=source,
        digest=digest,
    )


def engine_counts(fleet: Fleet) -> tuple[int, int]:
    """Engines in all, and healthy ones."""
    healthy = [bool(engine["healthy"]) for engine in fleet.describe()]
    return len(healthy), sum(healthy)


def agreed_rules(settings: Settings) -> str:
    """What replicas of a run must agree on, because each judges groups that others opened; as JSON in one form."""
    agreed = {
        "mode": settings.mode,
        "groups": settings.groups.model_dump(),
        "dispatch": settings.dispatch.model_dump(include={"admission", "groups_per_step", "wait_for_version"}),
        "rewards": [reward.model_dump(include={"name", "weight"}) for reward in settings.rewards],
        "teachers": [teacher.model_dump(include={"id", "top_k"}) for teacher in settings.teachers],
        "prompts": settings.prompts.model_dump(include={"epochs"}) if settings.prompts.path else {},
    }
    return json.dumps(agreed, sort_keys=True)


def rules(settings: Settings) -> Rules:
    """The rules of the run, in the core's words.

    In distillation a group is one rollout: one is enough, there is no baseline to compare it with, and one that failed
    costs itself and halts nothing; only many in a row that failed or were dropped do.
    """
    groups, dispatch = settings.groups, settings.dispatch
    alone = settings.mode == "distillation"
    least = 1 if alone else groups.min_group_size
    policy = Policy(
        group=GroupPolicy(
            max_staleness=groups.max_staleness,
            min_group_size=least,
            on_stale=OnStale(groups.on_stale),
            max_group_attempts=groups.max_group_attempts,
        ),
        slots=dispatch.max_inflight_rollouts,
        max_ready_groups=groups.max_ready_groups,
        max_ready_bytes=groups.max_ready_bytes,
        max_pending_groups=groups.max_pending_groups,
        max_lease_bytes=_lease_bytes(settings),
        admission=Admission(dispatch.admission),
        groups_per_step=dispatch.groups_per_step,
        wait_for_version=dispatch.wait_for_version,
        halt_after_failed_groups=0 if alone else groups.halt_after_failed_groups,
        halt_after_unproductive_groups=groups.halt_after_unproductive_groups,
    )
    scoring = ScoringRules(
        weights={reward.name: reward.weight for reward in settings.rewards},
        method=AdvantageMethod.NONE if alone else AdvantageMethod(groups.advantage),
        zero_variance=ZeroVariance(groups.zero_variance),
        min_group_size=least,
        distillation=alone,
    )
    return Rules(policy=policy, scoring=scoring, engine_wait_s=dispatch.engine_wait_s)


def _lease_bytes(settings: Settings) -> int:
    """The bound on a lease in the core's measure, which is 9 bytes a token: a teacher adds 8 a candidate to each."""
    columns = max((teacher.top_k + 1 for teacher in settings.teachers), default=0)
    return max(1, settings.store.max_lease_bytes * 9 // (9 + 8 * columns))
