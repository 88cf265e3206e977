"""The authorities tests trust: one. None of their servers speaks TLS, and reading the usual hundred takes 40 ms of
processor time for each HTTP client, of which tests, and the processes they start, make thousands.

What always holds: processes that tests start inherit it. Tests load nothing from elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path

import certifi

_END = "-----END CERTIFICATE-----\n"


def trust_one(file: Path) -> None:
    """`file` is written; it has to stay while tests run."""
    first, end, _ = Path(certifi.where()).read_text().partition(_END)
    file.write_text(first + end)
    os.environ["SSL_CERT_FILE"] = str(file)
