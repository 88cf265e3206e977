"""Datasets and submitted prompts, as checked `Prompt` values."""

from rollout_service.prompts.digest import content_digest
from rollout_service.prompts.files import PromptFile
from rollout_service.prompts.rows import RowError, parse_row, parse_submitted

__all__ = ["PromptFile", "RowError", "content_digest", "parse_row", "parse_submitted"]
