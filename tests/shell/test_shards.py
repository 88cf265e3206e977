"""No test file is left out, and none runs twice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import shards as shards_module
from tests.shards import NAMED, TESTS, shards


def test_every_test_file_is_in_exactly_one_shard():
    found_shards = shards()
    folders = [TESTS.parent / path for shard in found_shards for path in shard]
    found = [file for folder in folders for file in folder.rglob("test_*.py")]
    assert len(found) == len(set(found))
    assert set(found) == {file for file in TESTS.rglob("test_*.py")}
    assert len({file.name for file in found}) == len(found), "one pytest cannot import two files of one name"
    named = [{Path(path).name for path in shard} for shard in found_shards[:-1]]
    assert named == [set(names) for names in NAMED]


def test_a_process_that_hangs_is_interrupted_and_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards_module, "LIMIT_S", 0.0)
    hang = "import time; print('up', flush=True); time.sleep(600)"
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {hang}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    assert shards_module._ended(process, time.monotonic()) != 0
