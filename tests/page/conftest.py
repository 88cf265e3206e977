"""A browser for the session, a tab and a scripted backend for each test.

What always holds: a test whose page complained (console, CSP, failed loads) of something the test did not expect fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.page.backend import Backend
from tests.page.browser import Page, chromium, connected, find_chromium, required


@pytest.fixture(scope="session")
def chromium_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = find_chromium()
    if program is None:
        if required():
            pytest.fail("Chromium is not installed (Debian: apt install chromium), and REQUIRE_TOOLS=1")
        pytest.skip("Chromium is not installed (Debian: apt install chromium); .ci/run installs it and runs this")
    profile: Path = tmp_path_factory.mktemp("chromium")
    with chromium(program, profile) as address:
        yield address


@pytest.fixture
async def page(chromium_address: str) -> AsyncIterator[Page]:
    async with connected(chromium_address) as browser, browser.page() as page:
        yield page
        assert not page.unexpected(), page.unexpected()


@pytest.fixture
async def backend(page: Page) -> AsyncIterator[Backend]:
    async with Backend() as backend:
        yield backend
        await page.leave()  # or it would complain that its stream broke off
