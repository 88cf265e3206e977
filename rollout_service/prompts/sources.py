"""Rows by number, 0-based, from a .jsonl file, a .parquet file or a dataset of the `datasets` library.

Rows are decoded when they are asked for; a .jsonl file costs 16 bytes of memory a row. A file that is replaced while
it is open changes nothing: the open one is read on. Values come as the format has them; rows.py decides what is legal.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterator
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from rollout_service.errors import ConfigError
from rollout_service.prompts.rows import RowError, without_nulls
from rollout_service.settings.problems import printable

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1024
"""Rows of a table that are decoded at once when all are read."""
_DATASET_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_OTHER_FILES = frozenset({".json", ".txt", ".csv", ".tsv", ".gz", ".zst", ".zip", ".arrow", ".yaml", ".toml", ".py"})


class Source(Protocol):
    """A table of rows that does not change."""

    stem: str
    """What default prompt ids begin with."""
    digest: str
    """Equal for equal rows in equal order (hexadecimal)."""

    def __len__(self) -> int: ...

    def where(self, row: int) -> str:
        """Names a row in errors."""

    def read(self, row: int) -> Any:
        """One row; RowError where it cannot be decoded."""

    def scan(self) -> Iterator[Any]:
        """All rows, in order."""

    def close(self) -> None:
        """Frees what is open; nothing is read afterwards."""


def open_source(path: str) -> Source:
    """The source that `prompts.path` names. Raises ConfigError."""
    file = Path(path)
    suffix = file.suffix.lower()
    if file.is_dir():
        if (file / "state.json").is_file():
            return DatasetRows(path, saved=True)
        raise ConfigError(f"prompts.path: {path}: a directory; expected .jsonl, .parquet or a datasets name")
    if suffix in (".jsonl", ".parquet"):
        try:
            return JsonlRows(path) if suffix == ".jsonl" else ParquetRows(path)
        except OSError as error:
            raise ConfigError(f"prompts.path: {path}: cannot be read: {error.strerror or _first_line(error)}") from None
    if file.exists() or suffix in _OTHER_FILES or not _DATASET_NAME.fullmatch(path):
        raise ConfigError(f"prompts.path: {path}: expected .jsonl, .parquet or a datasets name")
    return DatasetRows(path, saved=False)


class JsonlRows:
    """One JSON object a line, UTF-8; blank lines are skipped."""

    def __init__(self, path: str) -> None:
        self.stem = Path(path).stem
        self._path = path
        self._offsets, self._lines = array("q"), array("q")
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 - stays open for as long as the source is used
        digest = sha256()
        offset = 0
        for number, line in enumerate(self._file, 1):
            digest.update(line)
            if line.strip():
                self._offsets.append(offset)
                self._lines.append(number)
            offset += len(line)
        self._end = offset
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, row: int) -> str:
        return f"{self._path}:{self._lines[row]}"

    def read(self, row: int) -> Any:
        start = self._offsets[row]
        end = self._offsets[row + 1] if row + 1 < len(self._offsets) else self._end
        # pread leaves the file's position alone, so that two threads can read at once.
        return self._decode(os.pread(self._file.fileno(), end - start, start), row)

    def scan(self) -> Iterator[Any]:
        self._file.seek(0)
        row = 0
        for line in self._file:
            if line.strip():
                yield self._decode(line, row)
                row += 1

    def close(self) -> None:
        self._file.close()

    def _decode(self, line: bytes, row: int) -> Any:
        if row == 0:
            line = line.removeprefix(_BOM)
        try:
            return msgspec.json.decode(line)
        except RecursionError:
            raise RowError(self.where(row), "", "nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._decode_slowly(line, row)

    def _decode_slowly(self, line: bytes, row: int) -> Any:
        # The standard library says more about what is wrong, and lets NaN and lone surrogates through to the check
        # that names their field.
        try:
            return json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise RowError(self.where(row), "", f"not UTF-8 (byte {error.start} of the line)") from None
        except json.JSONDecodeError as error:
            raise RowError(self.where(row), "", f"not JSON: {error.msg} (column {error.colno})") from None
        except (ValueError, RecursionError):
            raise RowError(self.where(row), "", "not JSON: a number too long or nested too deeply") from None


class ParquetRows:
    """A parquet file, held in memory in its column form."""

    def __init__(self, path: str) -> None:
        self.stem = Path(path).stem
        self._path = path
        with open(path, "rb") as file:
            digest = sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        self.digest = digest.hexdigest()
        try:
            parquet = import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                f"prompts.path: {path}: .parquet needs pyarrow; install rollout-service[parquet]"
            ) from None
        try:
            self._table = parquet.read_table(path)
        except (ValueError, NotImplementedError) as error:  # pyarrow's own errors are kinds of these
            raise ConfigError(f"prompts.path: {path}: not parquet: {_first_line(error)}") from None
        names = self._table.column_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"prompts.path: {path}: two columns are named {twice[0]!r}")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, row: int) -> str:
        return f"{self._path}: row {row}"

    def read(self, row: int) -> Any:
        return without_nulls(self._rows(row, 1)[0])

    def scan(self) -> Iterator[Any]:
        for start in range(0, len(self), _BLOCK):
            for row in self._rows(start, _BLOCK):
                yield without_nulls(row)

    def close(self) -> None:
        self._table = self._table.slice(0, 0)

    def _rows(self, start: int, count: int) -> list[dict[str, Any]]:
        try:
            rows: list[dict[str, Any]] = self._table.slice(start, count).to_pylist()
        except (
            ValueError,
            ArithmeticError,
            NotImplementedError,
        ) as error:  # text that is not UTF-8, a timestamp out of range
            at = self.where(start) if count == 1 else f"{self.where(start)} or one of the next {count - 1}"
            raise RowError(at, "", f"cannot be decoded: {_first_line(error)}") from None
        return rows


class DatasetRows:
    """A dataset of the `datasets` library, by name or as `save_to_disk` wrote it."""

    def __init__(self, path: str, *, saved: bool) -> None:
        self.stem = Path(path).name
        self._path = path
        try:
            datasets = import_module("datasets")
        except ImportError:
            raise ConfigError(
                f"prompts.path: {path}: no such file, and a dataset by name needs the datasets library; "
                "install rollout-service[datasets]"
            ) from None
        try:
            loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
        except Exception as error:  # the library raises what its backends raise: HTTP, files, its own
            what = f"{type(error).__name__}: {_first_line(error)}"
            raise ConfigError(f"prompts.path: {path}: no such file, and no dataset by that name: {what}") from error
        if isinstance(loaded, dict):
            if "train" not in loaded and len(loaded) != 1:
                raise ConfigError(f"prompts.path: {path}: no split named train, only {', '.join(sorted(loaded))}")
            loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
        self._rows = loaded
        # Rows are what counts, not where the library keeps them: the same dataset elsewhere has the same digest.
        digest = sha256()
        for row in self._rows:
            digest.update(repr(row).encode(errors="backslashreplace"))
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, row: int) -> str:
        return f"{self._path}: row {row}"

    def read(self, row: int) -> Any:
        return without_nulls(self._rows[row])

    def scan(self) -> Iterator[Any]:
        return map(without_nulls, self._rows)

    def close(self) -> None:
        self._rows = ()


def _first_line(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0][:200])
