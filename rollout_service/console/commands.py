"""The commands for people and scripts that look into a running service.

What always holds: exit code 0; 1 where the service cannot be reached or refuses; 2 for a wrong option; 3 only of
`status --check`. What goes wrong is one line on stderr. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from rollout_service.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from rollout_service.console.service import Service

UNREACHABLE, USAGE_ERROR, NOT_READY = 1, 2, 3
PIPE_COLUMNS = 160
"""Width where there is no terminal: `groups | less -S` should not be cut at 80."""

UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Base URL of the service; else ROLLOUT_SERVICE_URL, else http://127.0.0.1:8080."),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="File with the key, one line; else ROLLOUT_SERVICE_KEY. Never an option itself."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The service's own JSON, for scripts.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (top, status, groups, engines):
        app.command()(command)


def top(
    url: UrlOption = None,
    key_file: KeyOption = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two drawings.")] = 1.0,
) -> None:
    """Watch a run in the terminal until Ctrl-C; without a terminal, print it once.

    Exit code 1: the service cannot be reached at first, or refuses. Lost later, it is tried again for ever.
    """
    with _one_line_problems():
        service, console = _service(url, key_file), _console()

        from rollout_service.console.top import one_frame, watch

        if console.is_terminal:
            watch(service, console, interval_s=interval)
        else:
            one_frame(service, console)


def status(
    url: UrlOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit code 3 while halted, while no engine is healthy, or while the store cannot commit."
        ),
    ] = False,
) -> None:
    """What the run is doing now.

    Exit code 1: the service cannot be reached or refuses. 3: with --check, as said there; a pause is no reason.
    """
    with _one_line_problems():
        service = _service(url, key_file)

        from rollout_service.console.doing import not_ready
        from rollout_service.console.shapes import Status
        from rollout_service.console.tables import status_table

        body = service.get("/status")
        found = service.read(Status, "/status", body)
        _show(body, lambda width: status_table(found, width), as_json)
        if check and (why := not_ready(found)) is not None:
            typer.echo(f"rollout-service: not ready: {why}", err=True)
            raise typer.Exit(NOT_READY)


def groups(
    group_id: Annotated[str | None, typer.Argument(help="One group: its prompt, rollouts, rewards and errors.")] = None,
    state: Annotated[list[str] | None, typer.Option(help="Only groups in this state; may be repeated.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most groups of the list.")] = 100,
    after: Annotated[str | None, typer.Option(help="The list begins behind this group id.")] = None,
    url: UrlOption = None,
    key_file: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """List groups in order of submission, or look into one.

    Exit code 1: the service cannot be reached or refuses, an unknown group included.
    """
    with _one_line_problems():
        if group_id is not None and (state or after is not None):
            raise ConfigError("--state and --after choose from the list of groups; they do not go with a group id")
        service = _service(url, key_file)

        from rollout_service.console.shapes import GroupDetail, GroupPage
        from rollout_service.console.tables import group_view, groups_table

        if group_id is not None:
            path = f"/groups/{quote(group_id, safe='')}"
            body = service.get(path)
            one = service.read(GroupDetail, path, body)
            _show(body, lambda _: group_view(one), as_json)
        else:
            params = {"state": state or [], "limit": limit} | ({"after": after} if after is not None else {})
            body = service.get("/groups", params)
            page = service.read(GroupPage, "/groups", body)
            _show(body, lambda _: groups_table(page), as_json)


def engines(url: UrlOption = None, key_file: KeyOption = None, as_json: JsonOption = False) -> None:
    """Health and load of the engines.

    Exit code 1: the service cannot be reached or refuses.
    """
    with _one_line_problems():
        service = _service(url, key_file)

        from rollout_service.console.shapes import Engines
        from rollout_service.console.tables import engines_table

        body = service.get("/engines")
        found = service.read(Engines, "/engines", body)
        _show(body, lambda _: engines_table(found.engines), as_json)


def _service(url: str | None, key_file: Path | None) -> Service:
    from rollout_service.console.service import Service, target

    return Service(target(url, key_file))


def _console() -> Console:
    from rich.console import Console

    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a character shows its escape
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    return Console(markup=False, highlight=False, emoji=False)


def _show(body: bytes, shown: Callable[[int], RenderableType], as_json: bool) -> None:
    """`shown`: the table for a width. JSON is the service's own; a terminal gets what it might obey as escapes."""
    if not as_json:
        console = _console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = PIPE_COLUMNS
        console.print(shown(console.width))
    elif sys.stdout.isatty():
        typer.echo(_unarmed(body.decode("utf-8", "replace")))
    else:
        typer.echo(body)


def _unarmed(text: str) -> str:
    """The same JSON, with everything that is not printable written as a `\\u` escape."""
    import json

    return "".join(char if char.isprintable() or char in "\n\r\t" else json.dumps(char)[1:-1] for char in text)


@contextmanager
def _one_line_problems() -> Iterator[None]:
    from rollout_service.console.service import ServiceProblem

    try:
        yield
    except ConfigError as error:
        code, text = USAGE_ERROR, str(error)
    except ServiceProblem as problem:
        code, text = UNREACHABLE, str(problem)
    else:
        return
    from rollout_service.console.text import plain

    typer.echo(f"rollout-service: error: {plain(' '.join(text.split()), 1000)}", err=True)
    raise typer.Exit(code)
