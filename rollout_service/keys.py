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
import stat
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
        self.entries = frozenset(entries)
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
            found = self._file.stat()
        except OSError as error:
            raise ConfigError(f"{self._file}: {error.strerror or error}") from None
        seen = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
        if seen == self._seen:
            return False
        self.ring = KeyRing(checked([*self._inline, *read_keys(self._file)], self._file))
        self._seen = seen
        return True


def read_keys(path: Path) -> list[KeyEntry]:
    """The keys of a file of `[[keys]]` tables. Raises ConfigError."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path}: no regular file")
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        document = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError):
        # Without the parser's words: they may quote what stands there, and that may be a key.
        raise ConfigError(f"{path}: not TOML") from None
    tables = document.pop("keys", [])
    if document or not isinstance(tables, list):
        raise ConfigError(f"{path}: expected [[keys]] tables and nothing else")
    return checked([_entry(table, f"{path}: keys[{at}]") for at, table in enumerate(tables)], path)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in the file's place would wait for its writer for ever


def checked(entries: list[KeyEntry], where: object) -> list[KeyEntry]:
    """`entries`, where no name and no key stands twice. Raises ConfigError."""
    names: set[str] = set()
    hashes: dict[str, str] = {}
    for entry in entries:
        if entry.name in names:
            raise ConfigError(f"{where}: there is a key called {entry.name!r} already; give another name")
        if entry.hash in hashes:
            raise ConfigError(f"{where}: {hashes[entry.hash]!r} and {entry.name!r} are the same key")
        names.add(entry.name)
        hashes[entry.hash] = entry.name
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


def new_key() -> str:
    """A key nobody can guess."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def key_table(entry: KeyEntry, table: str = "server.keys") -> str:
    """The entry as TOML, for the configuration (`[[server.keys]]`) or a file of keys (`[[keys]]`)."""
    return f'[[{table}]]\nname = "{entry.name}"\nrole = "{entry.role}"\nhash = "{entry.hash}"\n'
