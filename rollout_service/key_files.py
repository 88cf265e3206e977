"""Files of keys, made and changed by the command line.

What always holds: a file is replaced whole or stays as it was, and is never readable by more than it may be; of two who
change one file at once the second sees what the first wrote; what stands in `<role>.key` is taken over only where it
is a key.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollout_service.errors import ConfigError
from rollout_service.keys import PREFIX, KeyEntry, Role, checked, hash_of, key_table, new_key, read_keys

HASHES_FILE = "keys.toml"
KEY = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}", re.ASCII)
MAX_KEY_FILE_BYTES = 4096
OPEN_TO_ALL = 0o644
"""Of hashes, and of the key that others scrape with."""
OPEN_TO_OWNER = 0o600


def make_keys(folder: Path) -> tuple[list[Path], list[Path]]:
    """A key of every role in `folder`, and their hashes in keys.toml, where they are not there yet.

    `<role>.key` holds the key alone: readable by its owner only, but for `read.key`. Returns the new files, and those
    that are missing: a key whose file is gone is not made anew while keys.toml still has its hash, for who removed it
    may hold it elsewhere. Raises ConfigError.
    """
    hashes = (folder / HASHES_FILE).resolve()
    with _changing(hashes):
        entries = read_keys(hashes) if hashes.exists() else []
        known = {entry.name for entry in entries}
        paths = {role: folder / f"{role}.key" for role in Role}
        keys = {role: _read_key(path) or new_key() for role, path in paths.items() if role not in known}
        entries += [KeyEntry(name=role.value, role=role, hash=hash_of(key)) for role, key in keys.items()]
        checked(entries, folder)
        for role, key in keys.items():  # first, so that a start that is broken off leaves no hash without its key
            _write(paths[role], f"{key}\n", OPEN_TO_ALL if role is Role.READ else OPEN_TO_OWNER)
        if keys:
            _write_entries(hashes, entries)
        made = [paths[role] for role in keys] + ([hashes] if keys else [])
        return made, [path for path in paths.values() if not path.exists()]


def add_to_file(path: Path, entry: KeyEntry) -> None:
    """One more key in a file of keys, which is made where it is missing. Raises ConfigError."""
    path = path.resolve()  # a link stays a link: who reads the file behind it must see the change
    with _changing(path):
        entries = read_keys(path) if path.exists() else []
        _write_entries(path, checked([*entries, entry], path))


def remove_from_file(path: Path, name: str) -> None:
    """The key that `make_keys` left beside the file goes with its hash: it would come back otherwise.

    Raises ConfigError where the file has no key of that name.
    """
    path = path.resolve()
    with _changing(path):
        entries = read_keys(path)
        gone = [entry for entry in entries if entry.name == name]
        if not gone:
            names = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"{path}: no key is called {name[:64]!a}; there are: {names}")
        _write_entries(path, [entry for entry in entries if entry.name != name])
        beside = path.with_name(f"{name}.key")
        try:
            if _text(beside) is not None and hash_of(_text(beside) or "") == gone[0].hash:
                beside.unlink()
        except OSError as error:
            raise ConfigError(f"{beside}: {error.strerror or error}") from None


def _read_key(path: Path) -> str | None:
    """The key a start that was broken off left there; None where there is no file."""
    text = _text(path)
    if text is not None and not KEY.fullmatch(text):
        raise ConfigError(f"{path}: holds no key ({PREFIX} and 43 characters); remove it, and one is made")
    return text


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_FILE_BYTES).decode("latin-1").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Alone with `path`, whose folder is made. Raises ConfigError for what the system refuses."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror or error}") from None


def _write_entries(path: Path, entries: Sequence[KeyEntry]) -> None:
    _write(path, "\n".join(key_table(entry, "keys") for entry in entries), OPEN_TO_ALL)


def _write(path: Path, text: str, mode: int) -> None:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
