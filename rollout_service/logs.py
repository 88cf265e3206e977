"""Logs: one event a line on stderr, as JSON or for people.

What always holds: the libraries' logs come out in the same shape; a line holds no prompt, no completion and no key
(fields of such names are struck out), no local variables of a traceback, and no field longer than MAX_TEXT characters.
"""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

MAX_TEXT = 4_000
"""An engine's message may hold a prompt of any length; its beginning says what went wrong."""
MAX_TRACEBACK = 20_000
SECRET_FIELDS = frozenset(
    {
        "api_key",
        "authorization",
        "column_values",
        "completion",
        "completions",
        "headers",
        "key",
        "messages",
        "prompt",
        "prompts",
        "prompt_token_ids",
        "text",
        "token",
        "token_ids",
    }
)
LEVELS = ("debug", "info", "warning", "error")
NOISY = ("aiohttp", "asyncio", "httpcore", "httpx", "urllib3", "uvicorn")
"""They tell of every request; their warnings are enough."""


class LogFormat(StrEnum):
    """How a line looks."""

    AUTO = "auto"
    """For people on a terminal, JSON everywhere else."""
    JSON = "json"
    CONSOLE = "console"


def configure(log_format: LogFormat = LogFormat.AUTO, level: str = "info") -> None:
    """Set up structlog and the standard library's logging for this process."""
    import structlog  # here and not above: the command line imports this module for its options

    people = log_format is LogFormat.CONSOLE or (log_format is LogFormat.AUTO and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,  # the plain traceback: prettier ones show local variables
        guarded,
    ]
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if people
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # It warns of every request that is no HTTP, which any stranger can send as often as he likes.
    logging.getLogger("uvicorn.error").setLevel(max(logging.ERROR, root.level))


def guarded(_: Any, __: str, event: EventDict) -> EventDict:
    """Strike out what must not be logged, and shorten what is long."""
    for name, value in event.items():
        if name in SECRET_FIELDS:
            event[name] = "(not logged)"
        elif isinstance(value, str):
            most = MAX_TRACEBACK if name in ("exception", "traceback") else MAX_TEXT
            if len(value) > most:
                event[name] = f"{value[:most]}… ({len(value)} characters)"
    return event
