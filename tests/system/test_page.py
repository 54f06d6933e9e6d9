"""The page of `recipe serve`: starts a run, shows how it goes, and ends it; no name and no log can break out of it.  Tried in Chromium."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from runner.server.page import PARTS
from tests.servers.rest import Rest
from tests.support import RECIPE
from tests.system.test_report_page import PROGRAM
from tests.system.test_report_page import RECIPE as HOSTILE
from tests.tools import chromium

GROW = """\
recipe: grow@1
summary: Report a loss until somebody ends it.
inputs:
  title: {type: string, doc: What to call it.}
  rate: {type: number, default: 0.5}
  kind: {type: choice, choices: [calm, loud], default: calm}
steps:
  first: {run: 'echo begun > {{ outputs.o }}', outputs: {o: first.txt}}
  train:
    run: |
      n=0; cat {{ steps.first.o }}; : {{ inputs.rate }}
      while :; do n=$((n + 1)); echo "{\\"step\\": $n, \\"loss\\": $n}" >> $RECIPE_METRICS; echo point $n of {{ inputs.title }}; sleep 0.05; done > {{ outputs.o }}
    metrics: true
    outputs: {o: train.txt}
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("page") / "space"
    root.mkdir()
    (root / "grow.yaml").write_text(
        GROW.replace("; done > {{ outputs.o }}", "; done; touch {{ outputs.o }}")
    )
    (root / "hostile.yaml").write_text(
        "recipe: hostile@1\nsummary: <img src=x onerror=window.__xss=8>" + HOSTILE
    )
    (root / "train.py").write_text(PROGRAM)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./grow.yaml", "./hostile.yaml"]\n')
    with Rest(root, "--with-worker") as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Tab:
    """A page of the browser, and what it complained of and asked for."""

    def __init__(self, browser: Any, width: int, scheme: str) -> None:
        self.page = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        ).new_page()
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


def address(rest: Rest, *words: str) -> str:
    """What `recipe ui` prints while a server runs."""
    found = subprocess.run(
        [*RECIPE, "ui", *words],
        cwd=rest.root,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return found.stdout.removeprefix("page: ").strip()


def test_a_run_is_started_watched_and_cancelled_in_a_browser(rest: Rest, browser: Any) -> None:
    where = address(rest)
    assert where.startswith(f"{rest.url}/#token=rcp_"), "the server that runs here is found"
    tab = Tab(browser, 1280, "light")
    page = tab.page
    page.goto(where)
    tab.until("window.ready")
    assert page.url == f"{rest.url}/" and page.evaluate(
        "[document.cookie, sessionStorage.token.length > 40]"
    ) == ["", True]
    page.click("#new")
    page.wait_for_selector("#inputs [data-name]")
    page.select_option("#recipe", "grow@1")
    page.fill("[data-name=title]", "Ann's run")
    page.click("text=more inputs")
    page.fill("[data-name=rate]", "much")
    page.click("#go")
    assert '"rate"' in page.wait_for_selector("#message:not([hidden])").inner_text(), (
        "what is wrong is shown, and nothing is stored"
    )
    page.fill("[data-name=rate]", "0.25")
    page.click("#plan")
    assert "2 of 2 steps would run" in page.wait_for_selector("#planned p").inner_text()
    page.click("#go")
    page.wait_for_selector("#chart canvas")
    points = int(page.get_attribute("#chart", "data-points"))
    tab.until("n => Number(document.getElementById('chart').dataset.points) > n + 20", points)
    tab.until("() => document.getElementById('text').textContent.includes(\"of Ann's run\")")
    assert (
        page.locator("#steps g").count() == 2
        and "train: 1 running" in page.text_content("#steps")
        and tab.fits()
    )
    (run,) = rest.get("/v1/runs")["runs"]
    assert "'rate': 0.25" in str(run["inputs"])
    silent = rest.ask("GET", f"/v1/runs/{run['id']}/logs?step=first&follow=true")
    assert (silent.status_code, silent.text) == (200, ""), (
        "a step that is over and printed nothing has an empty log"
    )
    page.click("[data-verb=cancel]")
    page.click("[data-verb=cancel] >> text=Really")
    tab.until("() => document.getElementById('chip').textContent.includes('cancelled')")
    page.wait_for_selector("[data-verb=retry]")
    page.wait_for_selector(".row >> text=cancelled")
    assert {
        urlsplit(url)._replace(path="", query="", fragment="").geturl() for url in tab.asked
    } == {rest.url}
    assert all(
        urlsplit(url).path.startswith("/v1/") or urlsplit(url).path in PARTS for url in tab.asked
    ) and not any("rcp_" in url.split("#")[0] for url in tab.asked)
    assert [text for text in tab.said if "422" not in text] == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_hostile_names_and_logs_do_not_break_out_of_the_page(
    rest: Rest, browser: Any, width: int, scheme: str
) -> None:
    run = rest.submit("hostile", key="hostile") if width == 1280 else "last"
    if width == 1280:
        rest.until(run, "FAILED")
    tab = Tab(browser, width, scheme)
    page = tab.page
    page.goto(address(rest, run))
    page.wait_for_selector("#chart canvas")
    page.wait_for_selector("#samples img", state="attached")
    tab.until("() => document.querySelectorAll('#samples img').length === 2")
    tab.until("() => document.getElementById('text').textContent.includes('diverged')")
    log = page.text_content("#text")
    assert (
        "<script>window.__xss=1</script>" in log
        and "<U+202E>reversed" in log
        and "\x1b" not in log
        and "10%" not in log
    )
    assert (
        page.eval_on_selector_all(
            "#links a", "all => all.map(each => [each.rel, each.textContent])"
        )
        == [["noopener noreferrer", 'https://runs.example/"><img/src=x/onerror=window.__xss=9>']]
        * 3
    )
    assert page.inner_text("#chip") == "✗ failed" and "train[lr=2]" in page.inner_text("#failed")
    assert "</title><script>window.__xss=6</script>" in page.text_content(
        "#given"
    ) and "fake.png" not in page.inner_html("#samples")
    assert "train: 1 failed, 2 done" in page.text_content("#steps")
    page.select_option("#metric", "</script><img src=x onerror=window.__xss=2>")
    page.select_option("#smooth", "0.9")
    page.click("#log")
    page.click("#each summary")
    assert page.evaluate("window.__xss === undefined") and tab.fits() and tab.said == []
    assert (
        page.evaluate(
            "(() => { try { document.body.innerHTML = '<b>'; return 'markup'; } catch (error) { return error.name; } })()"
        )
        == "TypeError"
    )
    page.goto(f"{rest.url}/#new")
    page.reload()
    page.wait_for_selector("#inputs", state="attached")
    tab.until("() => document.getElementById('recipe').options.length > 5")
    page.select_option("#recipe", "hostile@1")
    tab.until("() => document.getElementById('summary').textContent.includes('onerror')")
    assert page.evaluate("window.__xss === undefined") and tab.fits()


def test_without_a_token_the_page_shows_nothing_and_asks_for_one(rest: Rest, browser: Any) -> None:
    tab = Tab(browser, 390, "light")
    tab.page.goto(rest.url)
    tab.page.wait_for_selector("#token")
    assert tab.said == [] and tab.fits() and not any("/v1/" in url for url in tab.asked)
    tab.page.fill("#token", "rcp_wrong")
    tab.page.click("#sign button")
    tab.page.wait_for_selector("#token")
    tab.page.fill("#token", rest.token)
    tab.page.click("#sign button")
    tab.until("window.ready")


def test_the_files_of_the_page_are_of_the_server_alone(rest: Rest) -> None:
    for path in PARTS:
        found = rest.ask("GET", path, token="")
        policy = found.headers["content-security-policy"]
        assert (
            found.status_code == 200
            and policy.startswith("default-src 'none'; script-src 'self';")
            and "unsafe" not in policy
        )
        assert (
            found.headers["x-content-type-options"] == "nosniff"
            and "frame-ancestors 'none'" in policy
        )
        assert rest.ask("GET", path, token="", headers={"Host": "evil.example"}).status_code == 421
        assert rest.ask("POST", path, token="").status_code == 405


def test_the_token_of_the_page_stops_runs_and_makes_no_tokens(rest: Rest) -> None:
    token = address(rest).partition("token=")[2]
    assert rest.ask("GET", "/v1/runs", token=token).status_code == 200
    assert rest.ask("POST", "/v1/tokens", {"scope": "read"}, token=token).status_code == 403


def test_a_page_without_a_server_has_one_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    process = subprocess.Popen(
        [*RECIPE, "ui", "--no-open"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline().startswith(
            "page: http://127.0.0.1:"
        )
        assert (
            subprocess.run(
                [*RECIPE, "ui", "--no-open"],
                cwd=tmp_path,
                capture_output=True,
                timeout=30,
                check=False,
            ).returncode
            == 0
        )
    finally:
        process.terminate()
    assert process.wait(40) == 0 and not (tmp_path / ".recipe" / "server" / "address").exists()
