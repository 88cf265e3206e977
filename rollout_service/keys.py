"""API keys: who may call what, and how a key is made, kept and recognised.

What always holds: a key itself is shown or written once, when it is made, and never kept by the service, which knows
only its SHA-256 (a key has 256 random bits, so a slow hash would protect nothing more); recognising a key takes the
same time whichever key it is and whether there is one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollout_service.errors import ConfigError

PREFIX = "rsk_"
"""What a key begins with: scanners for leaked secrets know it by that."""
KEY_BYTES = 32
MAX_KEY_CHARACTERS = 256
MAX_FILE_BYTES = 2**20
HASH = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
HASHES_FILE = "keys.toml"


class Role(StrEnum):
    """What a key may do."""

    ADMIN = "admin"
    """Everything: pause and resume, cancel groups, add and remove engines."""
    TRAINER = "trainer"
    """Whatever `read` may, prompts, policy versions, leases, checkpoints and rewinds."""
    SUBMIT = "submit"
    """`POST /prompts`, and nothing else."""
    READ = "read"
    """Look at everything, prompts and completions included, and change nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """A key as the configuration has it."""

    name: str
    role: Role
    hash: str
    """`sha256:` and 64 hexadecimal digits."""


class KeyRing:
    """The keys of a service."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        self._keys = tuple((bytes.fromhex(entry.hash.removeprefix("sha256:")), entry) for entry in entries)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, key: str) -> KeyEntry | None:
        """Whose key this is."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found = None
        for known, entry in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(digest, known):
                found = entry
        return found


class Keys:
    """The keys of the configuration and those of its file, which may change while the service runs."""

    def __init__(self, inline: Sequence[KeyEntry], file: Path | None = None) -> None:
        """Reads the file. Raises ConfigError."""
        self._inline, self._file = tuple(inline), file
        self._seen: object = None
        self.ring = KeyRing(self._inline)
        self.reload()

    @property
    def required(self) -> bool:
        """Whether calls need a key. A file that has become empty lets nobody in, not everybody."""
        return bool(self._inline) or self._file is not None

    def reload(self) -> bool:
        """Read the file again if it changed; whether it did. Blocks; raises ConfigError and keeps the old keys."""
        if self._file is None:
            return False
        try:
            stat = self._file.stat()
        except OSError as error:
            raise ConfigError(f"server.keys_file: {self._file}: {error.strerror or error}") from None
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen == self._seen:
            return False
        self.ring = KeyRing(checked([*self._inline, *read_keys(self._file)], self._file))
        self._seen = seen
        return True


def new_key() -> str:
    """A key nobody can guess."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def key_table(entry: KeyEntry, table: str = "server.keys") -> str:
    """The entry as TOML, for the configuration (`[[server.keys]]`) or a file of keys (`[[keys]]`)."""
    return f'[[{table}]]\nname = "{entry.name}"\nrole = "{entry.role}"\nhash = "{entry.hash}"\n'


def read_keys(path: Path) -> list[KeyEntry]:
    """The keys of a file of `[[keys]]` tables. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"server.keys_file: {path}: larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"server.keys_file: {path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        # Without the parser's words: they may quote what stands there, and that may be a key.
        raise ConfigError(f"server.keys_file: {path}: not TOML") from None
    tables = document.pop("keys", [])
    if document or not isinstance(tables, list):
        raise ConfigError(f"server.keys_file: {path}: expected [[keys]] tables and nothing else")
    return checked([_entry(table, f"server.keys_file: {path}: keys[{at}]") for at, table in enumerate(tables)], path)


def checked(entries: list[KeyEntry], where: object) -> list[KeyEntry]:
    """`entries`, where no name and no key stands twice. Raises ConfigError."""
    for what, values in (("name", [e.name for e in entries]), ("key", [e.hash for e in entries])):
        if len(set(values)) != len(values):
            raise ConfigError(f"{where}: a {what} stands there twice")
    return entries


def _entry(table: object, where: str) -> KeyEntry:
    if not isinstance(table, dict) or set(table) != {"name", "role", "hash"}:
        raise ConfigError(f"{where}: expected name, role and hash")
    name, role, digest = table["name"], table["role"], table["hash"]
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where}.name: expected letters, digits, dots, dashes and underscores, 64 at most")
    if role not in list(Role):
        raise ConfigError(f"{where}.role: expected one of {', '.join(Role)}")
    if not isinstance(digest, str) or not HASH.fullmatch(digest):
        raise ConfigError(f"{where}.hash: expected sha256: and 64 hexadecimal digits, as `key create` prints them")
    return KeyEntry(name=name, role=Role(role), hash=digest)


def make_keys(folder: Path) -> list[Path]:
    """A key of every role in `folder`, and their hashes in keys.toml, where they are not there yet; the new files.

    `<role>.key` holds the key alone: readable by its owner only, but for `read.key`, which others scrape with. A key
    whose file is gone is not made anew while keys.toml still has it: who removed it may hold it elsewhere.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        hashes = folder / HASHES_FILE
        entries = read_keys(hashes) if hashes.exists() else []
        known = {entry.name for entry in entries}
        made: list[Path] = []
        for role in Role:
            path = folder / f"{role}.key"
            if role in known:
                continue
            key = path.read_text().strip() if path.exists() else new_key()  # a start that was broken off half-way
            _write(path, key + "\n", 0o644 if role is Role.READ else 0o600)
            entries.append(KeyEntry(name=role.value, role=role, hash=hash_of(key)))
            made.append(path)
        if made:
            _write(hashes, "\n".join(key_table(entry, "keys") for entry in entries), 0o644)
            made.append(hashes)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from None
    return made


def add_to_file(path: Path, entry: KeyEntry) -> None:
    """One more key in a file of keys, which is made where it is missing. Raises ConfigError."""
    entries = read_keys(path) if path.exists() else []
    _write_entries(path, checked([*entries, entry], path))


def remove_from_file(path: Path, name: str) -> None:
    """The key that `make_keys` left beside the file goes with its hash: it would come back otherwise.

    Raises ConfigError where the file has no key of that name.
    """
    entries = read_keys(path)
    left = [entry for entry in entries if entry.name != name]
    if len(left) == len(entries):
        names = ", ".join(entry.name for entry in entries) or "none"
        raise ConfigError(f"{path}: no key is called {name[:64]!a}; there are: {names}")
    _write_entries(path, left)
    beside = path.with_name(f"{name}.key")
    try:
        if beside.exists() and hash_of(beside.read_text().strip()) not in {entry.hash for entry in left}:
            beside.unlink()
    except OSError as error:
        raise ConfigError(f"{beside}: {error.strerror or error}") from None


def _write_entries(path: Path, entries: Sequence[KeyEntry]) -> None:
    try:
        _write(path, "\n".join(key_table(entry, "keys") for entry in entries), 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, text: str, mode: int) -> None:
    """Whole or not at all, and never readable by more than `mode` allows."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
