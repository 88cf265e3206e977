"""For every test: what depends on how the tests were started is made the same; what is there before them costs nothing.

Asking for the current event loop makes one on Python 3.11; pytest-asyncio does, never closes it, and the warning of its
collection would fail whichever test runs at that moment. A shell starts background jobs with SIGINT ignored, and
processes that the tests start and interrupt would inherit that.

A full garbage collection looks at a million objects that the imports of all tests made, for half a second: they are
frozen, so that those of the tests look at what tests made.
"""

import asyncio
import gc
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.certificates import trust_one
from tests.listening import OrderlyLoop

gc.disable()  # until everything is imported, which makes no garbage worth looking for
asyncio.set_event_loop(None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="certificates-")
    config.add_cleanup(folder.cleanup)
    trust_one(Path(folder.name) / "one.pem")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": OrderlyLoop}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
