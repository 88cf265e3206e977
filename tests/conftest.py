"""For every test: two things that depend on how the tests were started are made the same.

Asking for the current event loop makes one on Python 3.11; pytest-asyncio does, never closes it, and the warning of its
collection would fail whichever test runs at that moment. A shell starts background jobs with SIGINT ignored, and
processes that the tests start and interrupt would inherit that.
"""

import asyncio
import signal

asyncio.set_event_loop(None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
