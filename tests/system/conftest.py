"""Fixtures of the tests that open a server's page. A module with a fixture `rest` gets one browser and the page's address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.browser import address
from tests.servers.rest import Rest
from tests.tools import chromium


@pytest.fixture(scope="module")
def browser(rest: Rest) -> Iterator[Any]:
    """Chromium, started after the server's runs: its event loop allows no second one in the process."""
    del rest
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def where(rest: Rest) -> str:
    """The address of the page, with its token."""
    return address(rest)
