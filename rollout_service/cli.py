"""The command line. A mistake of the user's is one line on stderr and exit code 2, never a traceback.

Nothing heavy is imported before a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rollout_service import __version__
from rollout_service.console.commands import register
from rollout_service.errors import ConfigError
from rollout_service.logs import LogFormat

if TYPE_CHECKING:
    from rollout_service.settings import Settings
    from rollout_service.store import SqliteStore
    from rollout_service.store.copying import Copied
    from rollout_service.store.postgres import PostgresStore

USAGE_ERROR = 2

app = typer.Typer(
    name="rollout-service",
    help="Asynchronous rollouts for reinforcement learning: prompts in, scored groups out, nothing stale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

stores = typer.Typer(
    help="Look into a store, copy a run to another one, or make a SQLite file smaller.", no_args_is_help=True
)
app.add_typer(stores, name="store")
keys = typer.Typer(help="Make and revoke API keys.", no_args_is_help=True)
app.add_typer(keys, name="key")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The TOML file; missing: environment (ROLLOUT_…) and defaults only."),
]
LogFormatOption = Annotated[LogFormat, typer.Option(help="auto: for people on a terminal, else JSON.")]
LogLevelOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def main() -> None:
    """Entry point of `rollout-service`."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rollout-service {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Over server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Over server.port.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on any address without API keys: the network is the lock.")
    ] = False,
    log_format: LogFormatOption = LogFormat.AUTO,
    log_level: LogLevelOption = "info",
) -> None:
    """Run the service until SIGTERM or SIGINT."""
    with _one_line_errors():
        _set_up_logs(log_format, log_level)
        settings, config_dir = _load(config, host=host, port=port, insecure=insecure or None)

        from rollout_service.app import Parts
        from rollout_service.server import bind
        from rollout_service.server import serve as run

        sock = bind(settings.server.host, settings.server.port)
        run(settings, Parts(settings, config_dir), sock)


@app.command()
def check(config: ConfigOption = None) -> None:
    """Say what is wrong with a configuration without starting: also imports the rewards and reads the prompts file."""
    with _one_line_errors():
        _set_up_logs(LogFormat.AUTO, "error")
        settings, config_dir = _load(config)

        import asyncio

        from rollout_service.checks import check_all

        asyncio.run(check_all(settings, config_dir))
    typer.echo(f"{config or 'configuration'}: good")


@app.command("simulate-engine")
def simulate_engine(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free port; the first line on stdout tells it.")] = 8000,
    model: Annotated[str, typer.Option(help="The one model name served.")] = "simulated",
    max_model_len: Annotated[int, typer.Option(help="Prompt and completion together, in tokens.")] = 4096,
    seed: Annotated[int, typer.Option(help="Same seed and request ids: same completions.")] = 0,
    tokens_per_s: Annotated[float, typer.Option(help="Speed of one request alone.")] = 600.0,
    batch_half: Annotated[float, typer.Option(help="At this many others a request runs at half its speed.")] = 16.0,
    latency: Annotated[float | None, typer.Option(help="Fixed seconds a completion, instead of a speed.")] = None,
    jitter: Annotated[float, typer.Option(help="Share by which --latency is spread.")] = 0.0,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that decode together.")] = None,
    lengths: Annotated[str, typer.Option(help="Completion lengths: fixed, uniform or lognormal.")] = "lognormal",
    mean_tokens: Annotated[int, typer.Option(help="Mean completion length.")] = 128,
    sigma: Annotated[float, typer.Option(help="Shape of the lognormal.")] = 0.8,
    logprobs_mode: Annotated[str, typer.Option(help="What /server_info reports.")] = "raw_logprobs",
    dev_mode: Annotated[bool, typer.Option(help="The routes of VLLM_SERVER_DEV_MODE.")] = True,
    scale_out: Annotated[bool, typer.Option(help="The /inference routes of --enable-scale-out.")] = True,
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="Key that guards it; empty: open.")] = "",
) -> None:
    """Run an engine that behaves like vLLM: for tests, benchmarks, and trainers without a GPU."""
    given = dict(locals())
    with _one_line_errors():
        from rollout_service import simulator

        try:
            settings = simulator.SimulatorSettings(**given)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        code = simulator.serve(settings)
    raise typer.Exit(code)


@keys.command()
def create(
    role: Annotated[str, typer.Option(help="admin, trainer, submit or read.")],
    name: Annotated[str | None, typer.Option(help="For people and the log; the role where it is not given.")] = None,
    file: Annotated[Path | None, typer.Option(help="Put its hash into this server.keys_file.")] = None,
) -> None:
    """Make an API key: the key on the first line, shown this once, then its table for the configuration."""
    with _one_line_errors():
        from rollout_service.key_files import add_to_file
        from rollout_service.keys import NAME, KeyEntry, Role, hash_of, key_table, new_key

        if role not in list(Role):
            raise ConfigError(f"--role: expected one of {', '.join(Role)}")
        if name is not None and not NAME.fullmatch(name):
            raise ConfigError("--name: expected letters, digits, dots, dashes and underscores, 64 at most")
        key = new_key()
        entry = KeyEntry(name=name or role, role=Role(role), hash=hash_of(key))
        if file is not None:
            add_to_file(file, entry)
    typer.echo(key)
    if file is None:
        typer.echo()
        typer.echo(key_table(entry), nl=False)


@keys.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name.")],
    file: Annotated[Path, typer.Option(help="The server.keys_file it stands in.")],
) -> None:
    """Take a key out of a file of keys; a running service refuses it within seconds."""
    with _one_line_errors():
        from rollout_service.key_files import remove_from_file

        remove_from_file(file, name)
    typer.echo(f"{file}: {name} is no key any more")


@keys.command()
def init(folder: Annotated[Path, typer.Argument(help="Where the keys are to lie.")]) -> None:
    """Make a key of every role in FOLDER, and keys.toml for server.keys_file, where they are not there yet."""
    with _one_line_errors():
        from rollout_service.key_files import make_keys

        made, missing = make_keys(folder)
    for path in made:
        typer.echo(f"made {path}")
    if not made:
        typer.echo(f"{folder}: the keys are there already")
    for path in missing:
        name = path.stem
        typer.echo(f"{path} is gone; for a new one: key revoke {name} --file {folder / 'keys.toml'}, then key init")


@stores.command()
def stats(config: ConfigOption = None) -> None:
    """Print what is in the store as JSON, bytes and counts; the service may be running."""
    with _one_line_errors():
        store = _configured_store(config)

        import json
        from dataclasses import asdict

        from rollout_service.store import SqliteStore

        if isinstance(store, SqliteStore):
            from rollout_service.store.sqlite_admin import store_stats

            named, found = {"path": str(store.path)}, store_stats(store.path)
            said = {**named, **asdict(found), "outstanding": found.outstanding}
        else:
            import asyncio

            from rollout_service.store.postgres_admin import store_stats as postgres_stats

            shared = asyncio.run(postgres_stats(store))
            said = {"database": store.name, **asdict(shared), "outstanding": shared.outstanding}
    typer.echo(json.dumps(said, indent=2))


@stores.command()
def compact(config: ConfigOption = None) -> None:
    """Give the free pages of a SQLite file back to the disk; the service must not be running."""
    with _one_line_errors():
        store = _configured_store(config)

        from rollout_service.store import SqliteStore
        from rollout_service.store.sqlite_admin import compact as rewrite

        if isinstance(store, SqliteStore):
            before, after = rewrite(store.path)
            said = f"{store.path}: {before} bytes before, {after} after"
        else:
            said = (
                f"{store.name}: nothing to do: PostgreSQL's autovacuum frees the room of what was removed for what is"
                " written next; `store stats` shows its dead rows"
            )
    typer.echo(said)


@stores.command(context_settings={"allow_extra_args": True})
def copy(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="sqlite:///old.db or postgresql://user@host/database.")],
    target: Annotated[str, typer.Argument(help="Likewise; a file that does not exist yet, or an empty database.")],
) -> None:
    """Copy a whole run into a new store, all or nothing; no service may run on either.

    A password is better left to PGPASSWORD or PGPASSFILE: the arguments of a process can be seen by others.
    """
    with _one_line_errors():
        if context.args:  # not left to whoever would print them: there may be a password in them
            raise ConfigError(f"store copy takes SOURCE and TARGET, and got {2 + len(context.args)} arguments")
        _set_up_logs(LogFormat.AUTO, "error")

        import asyncio

        from rollout_service.store.copying import copy_store

        done = asyncio.run(copy_store(source, target, progress=_progress()))
    _show_copied(done)


register(app)  # here, so that `--help` lists the commands that look into a run behind the one that starts it


def _configured_store(config: Path | None) -> SqliteStore | PostgresStore:
    """The configured store, not opened. Raises ConfigError where it is one that keeps nothing."""
    _set_up_logs(LogFormat.AUTO, "error")
    settings, _ = _load(config)

    from rollout_service.store import MemoryStore, open_store

    store = open_store(settings.store.url, max_staleness=settings.groups.max_staleness)
    if isinstance(store, MemoryStore):
        raise ConfigError("store.url: memory:// keeps nothing; there is no store to look into")
    return cast("SqliteStore | PostgresStore", store)  # what else `open_store` makes


def _progress() -> Callable[[str, int], None] | None:
    """Says on a terminal how far a copy is, about once a second."""
    if not sys.stderr.isatty():
        return None
    last = 0.0

    def tell(doing: str, rows: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1:
            last = now
            typer.echo(f"{doing} {rows:,} rows", err=True)

    return tell


def _show_copied(done: Copied) -> None:
    """Both sides, beside each other."""
    for name, was, found in done.table():
        typer.echo(f"{name:<22}{was:>20}{found:>20}")
    typer.echo(f"{'sha256':<22}{done.source.digest}")
    for what in done.left_behind:
        typer.echo(f"not copied: {what}")
    typer.echo("copied: both stores hold the same; the source was not changed, never start a service on both")


def _load(
    config: Path | None, *, host: str | None = None, port: int | None = None, insecure: bool | None = None
) -> tuple[Settings, Path | None]:
    """Settings, and the folder of their file, which is now in front of sys.path for the rewards' modules."""
    from rollout_service.settings import load_settings

    settings = load_settings(config, host=host, port=port, insecure=insecure)
    if config is None:
        return settings, None
    folder = config.resolve().parent
    sys.path.insert(0, str(folder))
    return settings, folder


def _set_up_logs(log_format: LogFormat, level: str) -> None:
    from rollout_service.logs import LEVELS, configure

    if level not in LEVELS:
        raise ConfigError(f"--log-level: expected one of {', '.join(LEVELS)}, got {level[:40]!a}")
    configure(log_format, level)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        line = " ".join(str(error).split())
        typer.echo(f"rollout-service: error: {line}", err=True)
        raise typer.Exit(USAGE_ERROR) from None
