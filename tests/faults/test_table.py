"""The table of public faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_and_file_that_the_table_names_is_there() -> None:
    table = (ROOT / "docs" / "faults.md").read_text()
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", table))
    assert len(named) > 40
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
    assert [path for path in re.findall(r"`(\w+/[\w/]+\.py)`", table) if not (ROOT / path).exists()] == []
