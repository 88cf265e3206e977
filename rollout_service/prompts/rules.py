"""What the configuration asks of every row, whether it comes from a file or over HTTP."""

from __future__ import annotations

from rollout_service.prompts.rows import RowRules
from rollout_service.settings import Settings
from rollout_service.settings.tables import MAX_GROUP_SIZE


def row_rules(settings: Settings) -> RowRules:
    """For `parse_row`, `parse_submitted` and `PromptFile.open`.

    In distillation each rollout is a group of its own: one is enough, and a row must not ask for more of them than the
    queue holds, which it could never enter.
    """
    groups = settings.groups
    if settings.mode == "grpo":
        return RowRules(default_num_generations=groups.num_generations, min_group_size=groups.min_group_size)
    return RowRules(
        default_num_generations=groups.num_generations,
        min_group_size=1,
        max_num_generations=min(MAX_GROUP_SIZE, groups.max_pending_groups),
        teachers=tuple(teacher.id for teacher in settings.teachers),
    )
