"""The service's OpenAPI document as it was agreed on, in `openapi.json` beside this file.

    python -m tests.api.openapi_snapshot             what has changed since; exit status 1 if anything has
    python -m tests.api.openapi_snapshot --write     agree to it

The file has sorted keys and one line a value, so that a diff shows what a client would notice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.api.test_openapi import document

SNAPSHOT = Path(__file__).with_name("openapi.json")
COMMAND = "python -m tests.api.openapi_snapshot --write"


def text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def agreed() -> dict[str, Any]:
    """The document in the file."""
    found: dict[str, Any] = json.loads(SNAPSHOT.read_text())
    return found


def differences(now: dict[str, Any]) -> str:
    """What the file has (-) and `now` has (+), a line a value with the way that leads to it; empty: all is alike."""
    before = set(_values(agreed())) if SNAPSHOT.exists() else set()
    after = set(_values(now))
    lines = [(line, "-") for line in before - after] + [(line, "+") for line in after - before]
    return "\n".join(f"{sign} {line}" for line, sign in sorted(lines))


def _values(value: Any, way: str = "") -> Iterator[str]:
    if isinstance(value, dict | list) and value:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _values(child, f"{way}.{key}" if way else str(key))
    else:
        yield f"{way}: {json.dumps(value, ensure_ascii=False)}"


def main() -> None:
    arguments = argparse.ArgumentParser(description="compare the OpenAPI document with the one agreed on")
    arguments.add_argument("--write", action="store_true", help="agree to the document as it is now")
    write = arguments.parse_args().write
    found = differences(document())
    if found:
        print(found)
    if write:
        SNAPSHOT.write_text(text(document()))
    sys.exit(1 if found and not write else 0)


if __name__ == "__main__":
    main()
