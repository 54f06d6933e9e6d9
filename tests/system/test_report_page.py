"""`recipe report --html` writes one file that loads nothing, shows the whole run, and that no name or log can break out of: tried in Chromium and Firefox."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runner.interface.cli.main import main
from tests.servers.firefox import firefox
from tests.support import Space
from tests.tools import chromium

PROGRAM = """
import json, os, struct, sys, zlib
lr, out, evil = float(sys.argv[1]), sys.argv[3], "<script>window.__xss=1</script>"
with open(os.environ["RECIPE_METRICS"], "a") as told:
    for step in range(1, 60):
        print(json.dumps({"step": step, "loss": lr + 1 / step, "</script><img src=x onerror=window.__xss=2>": step, "__proto__": step}), file=told)
print(evil, "\\x1b[31mred\\x1b[0m", "\\u202ereversed", "<img src=x onerror='window.__xss=3'>")
print("10%\\r100%")
print("recipe-link: W&B https://runs.example/\\"><img/src=x/onerror=window.__xss=9>\\nrecipe-link: x javascript:window.__xss=9")
print("last words of", lr, "]]> --> </pre></script>")
if lr > 1:
    sys.exit("diverged " + evil)
chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
name = f"{out}<img src=x onerror=window.__xss=4>{lr}.png"
pixels = b"".join(b"\\0" + bytes([80, 120, 200] * 16) for _ in range(16))
open(name, "wb").write(b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b""))
open(out + "fake.png", "w").write("<svg onload=window.__xss=5>")
open(out + "data.md", "w").write("# rows: 7 " + evil)
"""
RECIPE = """
inputs:
  word: {type: string, default: "</title><script>window.__xss=6</script>"}
  rates: {type: list, items: number, default: [0.1, 0.5, 2]}
steps:
  train:
    matrix: {lr: "{{ inputs.rates }}"}
    run: [python, train.py, "{{ matrix.lr }}", "{{ inputs.word }}", "{{ outputs.out }}/"]
    code: [train.py]
    outputs: {out: "out{{ matrix.lr }}/"}
    metrics: true
  best: {select: train, min: loss}
  after: {run: [cp, -r, "{{ steps.best.out }}", "{{ outputs.o }}"], outputs: {o: best}}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run in which two instances were fresh, one failed, and everything that has a name is hostile."""
    space = Space(tmp_path_factory.mktemp("page"))
    space.write("train.py", PROGRAM)
    space.recipe(RECIPE)
    space.attempt({"rates": [0.1, 0.5]})
    target = space.root / "report.html"
    assert (
        main(
            [
                "run",
                "-C",
                str(space.root),
                "./recipe.yaml",
                "-k",
                "--name",
                "<b>base</b>",
                "--note",
                "<img src=x onerror=window.__xss=7>",
            ]
        )
        == 1
    )
    assert main(["report", "-C", str(space.root), "--html", "-o", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Tags(HTMLParser):
    """The elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_file_loads_nothing_and_has_only_our_scripts(page: Path) -> None:
    text = page.read_text("utf-8")
    tags = Tags(text).found
    pictures = sum(
        len(str(attrs["src"])) for tag, attrs in tags if tag == "img" and attrs.get("src")
    )
    assert len(text) - pictures < 300_000
    assert [attrs.get("type") for tag, attrs in tags if tag == "script"] == [
        "application/json",
        None,
        None,
    ]
    assert all(
        attrs["src"].startswith("data:image/png;base64,")
        for tag, attrs in tags
        if tag == "img" and attrs.get("src") is not None
    )
    assert not any(name.startswith("on") or name == "style" for _, attrs in tags for name in attrs)
    assert not [
        attrs for tag, attrs in tags if tag in ("link", "iframe", "object", "embed", "form", "base")
    ]
    away = [
        attrs
        for tag, attrs in tags
        if tag == "a" and not str(attrs.get("href", "#")).startswith("#")
    ]
    assert away == [
        {
            "href": 'https://runs.example/"><img/src=x/onerror=window.__xss=9>',
            "rel": "noopener noreferrer",
        }
    ], "what the step said, and no more"
    policy = next(
        str(attrs["content"]) for tag, attrs in tags if tag == "meta" and attrs.get("http-equiv")
    )
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-")
        and "unsafe" not in policy
        and text.index("Content-Security-Policy") < text.index("<title>")
    )


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_browser_shows_a_hostile_run_and_nothing_breaks_out(
    page: Path, browser: Any, width: int, scheme: str
) -> None:
    said: list[str] = []
    asked: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(page.as_uri())
    tab.wait_for_function("window.ready")
    assert said == [] and [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert tab.evaluate(
        "[window.__xss === undefined, document.documentElement.scrollWidth === innerWidth]"
    ) == [True, True]
    text = tab.inner_text("body")
    assert (
        "failed t@1 <b>base</b>" in text
        and "diverged <script>window.__xss=1</script>" in text
        and "</title><script>window.__xss=6</script>" in text
    )
    assert (
        tab.locator("#steps g[role=listitem]").count() == 3
        and tab.locator("#time rect.bar").count() == 1
    )
    assert tab.locator(
        "#chart canvas"
    ).count() == 1 and "thick: the best, train[lr=0.1]" in tab.inner_text("#legend")
    tab.select_option("#metric", "</script><img src=x onerror=window.__xss=2>")
    tab.select_option("#smooth", "0.9")
    tab.click("#log")
    assert tab.locator("#images img").count() == 2 and "fake.png" not in tab.inner_html(
        "#images"
    ), "what has no picture's bytes is none"
    assert tab.evaluate(
        "[...document.querySelectorAll('#images img')].every(each => (each.loading = 'eager', true))"
    )
    assert tab.locator("#results tr.best").count() == 1
    tab.click("#results th:nth-child(2) button")
    tab.click("#results th:nth-child(2) button")
    assert tab.inner_text("#results tbody tr:first-child td:nth-child(2)") == "2"
    tab.fill("#filter", "failed")
    assert tab.inner_text("#count") == "1 of 3"
    log = tab.text_content("#logs details.bad pre")
    assert (
        "<U+202E>reversed" in log
        and "red " in log
        and "\x1b" not in log
        and "10%" not in log
        and "]]> --> </pre></script>" in log
    )
    assert (
        "from run" in tab.text_content("#logs")
        and "# rows: 7" in tab.text_content("#files")
        and "no earlier run in this workspace" in tab.inner_text("#why")
    )
    assert said == [] and tab.evaluate("window.__xss === undefined")
    context.close()


def test_the_page_is_readable_without_javascript(page: Path, browser: Any) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.goto(page.as_uri())
    assert "Curves need JavaScript" in tab.inner_text(
        "#curves"
    ) and "train[lr=0.5]" in tab.inner_text("#results")
    context.close()


def test_firefox_opens_the_file_from_disk(page: Path) -> None:
    with firefox("dark") as tab:
        for width in (390, 1280):
            tab.open(page.as_uri(), width)
            tab.until("window.ready && document.querySelector('#chart canvas')")
            assert tab.look(
                "(page => page.scrollWidth === page.clientWidth)(document.documentElement)"
            )
        assert tab.look("matchMedia('(prefers-color-scheme: dark)').matches")
        assert tab.look("document.querySelectorAll('#steps g[role=listitem]').length") == 3
        tab.look("document.querySelectorAll('#results th button')[1].click()")
        tab.look("document.querySelectorAll('#results th button')[1].click()")
        first = "document.querySelector('#results tbody tr').cells[1].textContent"
        assert tab.look(first) == "2", "it sorts"
        typed = "filter => { filter.value = 'failed'; filter.dispatchEvent(new Event('input')); }"
        tab.look(f"({typed})(document.getElementById('filter'))")
        assert tab.look("document.getElementById('count').textContent") == "1 of 3"
        assert tab.look("window.__xss === undefined") and tab.said == []
        assert [url for url in tab.asked if not url.startswith("data:")] == [], "nothing is loaded"
