"""Datasets and submitted prompts, as checked `Prompt` values."""

from rollout_service.prompts.digest import content_digest
from rollout_service.prompts.files import PromptFile
from rollout_service.prompts.rows import TEACHER_ID, RowError, parse_row, parse_submitted
from rollout_service.prompts.rules import row_rules

__all__ = [
    "TEACHER_ID",
    "PromptFile",
    "RowError",
    "content_digest",
    "parse_row",
    "parse_submitted",
    "row_rules",
]
