"""A tab of a browser on the page of a server, and what people with a screen reader would stumble over in it."""

from __future__ import annotations

import functools
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.servers.rest import Rest
from tests.support import RECIPE

AXE = Path(__file__).parents[2] / ".cache/clients/axe/node_modules/axe-core/axe.min.js"
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
COLOURS = ["color-contrast", "link-in-text-block"]
"""Rules that another scheme of colours may break."""


class Tab:
    """A page of the browser, and what it complained of and asked for."""

    def __init__(self, browser: Any, width: int, scheme: str) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=False
        )
        self.page = self.context.new_page()
        self._scheme = scheme
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console", lambda message: self.said.append(f"{message.text} {message.location['url']}")
        )
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def until(self, what: str, arg: object = None) -> None:
        """Wait until an expression is true; playwright's own way evaluates strings, which the page forbids."""
        deadline = time.monotonic() + 30
        while not self.page.evaluate(what, arg):
            assert time.monotonic() < deadline, (what, self.said)
            self.page.wait_for_timeout(50)

    def fits(self) -> bool:
        """Whether nothing is wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth === innerWidth"))

    def faults(self) -> list[str]:
        """What axe-core finds against WCAG 2.2 AA and its best practices, in light and in dark; and whether something is wider than the window."""
        self.page.evaluate(f"() => {{ {_axe()} }}")
        found = self._violations(TAGS)
        self.page.emulate_media(color_scheme="dark" if self._scheme == "light" else "light")
        found += self._violations(COLOURS)
        self.page.emulate_media(color_scheme=self._scheme)
        return found + ([] if self.fits() else ["the page is wider than the window"])

    def _violations(self, rules: list[str]) -> list[str]:
        found = self.page.evaluate(
            "rules => axe.run({ runOnly: rules }).then(all => all.violations)", rules
        )
        return [
            f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for each in found
            for node in each["nodes"]
        ]


@functools.cache
def _axe() -> str:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: make clients")
    return AXE.read_text("utf-8")


def address(rest: Rest, *words: str) -> str:
    """What `recipe ui` prints while a server runs."""
    found = subprocess.run(
        [*RECIPE, "ui", *words],
        cwd=rest.root,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return found.stdout.removeprefix("page: ").strip()
