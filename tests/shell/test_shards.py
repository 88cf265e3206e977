"""No test file is left out, and none runs twice."""

from __future__ import annotations

from pathlib import Path

from tests.shards import FIRST, TESTS, shards


def test_every_test_file_is_in_exactly_one_shard():
    first, second = shards()
    folders = [TESTS.parent / path for path in (*first, *second)]
    found = [file for folder in folders for file in folder.rglob("test_*.py")]
    assert len(found) == len(set(found))
    assert set(found) == {file for file in TESTS.rglob("test_*.py")}
    assert {Path(path).name for path in first} == set(FIRST)
