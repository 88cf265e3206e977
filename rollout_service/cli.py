"""The command line. A mistake of the user's is one line on stderr and exit code 2, never a traceback.

Nothing heavy is imported before a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service import __version__
from rollout_service.console.commands import register
from rollout_service.errors import ConfigError
from rollout_service.logs import LogFormat

if TYPE_CHECKING:
    from rollout_service.settings import Settings

USAGE_ERROR = 2

app = typer.Typer(
    name="rollout-service",
    help="Asynchronous rollouts for reinforcement learning: prompts in, scored groups out, nothing stale.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

stores = typer.Typer(help="Look into a SQLite store, or make its file smaller.", no_args_is_help=True)
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
        path = _store_file(config)

        import json
        from dataclasses import asdict

        from rollout_service.store.sqlite_admin import store_stats

        found = store_stats(path)
    typer.echo(json.dumps({"path": str(path), **asdict(found), "outstanding": found.outstanding}, indent=2))


@stores.command()
def compact(config: ConfigOption = None) -> None:
    """Give the file's free pages back to the disk; the service must not be running."""
    with _one_line_errors():
        path = _store_file(config)

        from rollout_service.store.sqlite_admin import compact as rewrite

        before, after = rewrite(path)
    typer.echo(f"{path}: {before} bytes before, {after} after")


register(app)  # here, so that `--help` lists the commands that look into a run behind the one that starts it


def _store_file(config: Path | None) -> Path:
    """The file of the configured store. Raises ConfigError where that is no SQLite store."""
    _set_up_logs(LogFormat.AUTO, "error")
    settings, _ = _load(config)

    from rollout_service.store import SqliteStore, open_store

    store = open_store(settings.store.url, max_staleness=settings.groups.max_staleness)
    if not isinstance(store, SqliteStore):
        raise ConfigError(f"store.url: {settings.store.url!r} is no SQLite store; there is no file to look into")
    return store.path


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
