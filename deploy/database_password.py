"""The password of compose's PostgreSQL, made once in the folder given: `python database_password.py FOLDER`.

What always holds: a password that is there stays, and `pgpass`, which replicas read, is never there without `password`,
which PostgreSQL reads. `pgpass` is its owner's alone, for clients refuse others; PostgreSQL runs as somebody else, so
`password` is open within its volume, which nothing else mounts.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Make what is missing. Raises OSError where the folder cannot be written."""
    password = folder / "password"
    if not password.exists():
        put(password, secrets.token_urlsafe(32), 0o644)
    put(folder / "pgpass", f"postgres:5432:rollout:rollout:{password.read_text()}\n", 0o600)


def put(path: Path, text: str, mode: int) -> None:
    """Write it whole or not at all."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    new.chmod(mode)  # whatever the umask
    new.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
