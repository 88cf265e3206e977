"""A service that is one migration ahead, without a hook in production code.

What always holds: only the process that obeyed is ahead; its migrations are read from a folder by the service's own
code; the one that was added changes the tables that are used most and works with the services of today.
"""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

from rollout_service.store import postgres_schema

PLACE = Path("migrations", "postgres")
NEXT = """-- works with: {newest}
ALTER TABLE groups ADD COLUMN note text NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN note text NOT NULL DEFAULT '';
ALTER TABLE leases ADD COLUMN note text NOT NULL DEFAULT '';
CREATE INDEX groups_by_note ON groups (note) WHERE note <> '';
"""


def newest() -> int:
    """Schema version of the services of today."""
    return len(postgres_schema.migrations())


def folder_of_tomorrow(at: Path) -> Path:
    """The migrations there are and one more, in a new folder `at`."""
    with resources.as_file(resources.files("rollout_service.store") / str(PLACE)) as today:
        shutil.copytree(today, at / PLACE)
    (at / PLACE / f"{newest() + 1:04}_note.sql").write_text(NEXT.format(newest=newest()))
    return at


def order(tomorrow: Path) -> tuple[str, str]:
    """For `Lives.begin`: the life is of tomorrow's service."""
    return "tests.replicas_chaos.upgrade:obey", str(tomorrow)


def obey(tomorrow: str) -> None:
    """In the new life."""
    setattr(postgres_schema, "resources", SimpleNamespace(files=lambda _: Path(tomorrow)))  # noqa: B010  # no module, to mypy
