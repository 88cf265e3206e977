"""For every test: no event loop lies about before the first one is asked for.

On Python 3.11 asking for the current loop makes one; pytest-asyncio does, never closes it, and the warning of its
collection would fail whichever test runs at that moment.
"""

import asyncio

asyncio.set_event_loop(None)
