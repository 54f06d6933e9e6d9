"""The page of `recipe serve`: starts a run, shows how it goes, and ends it; no name and no log can break out of it.  Tried in Chromium, and opened in Firefox."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from runner.interface.page import HERE, bundle
from runner.server.page import PARTS
from tests.servers.browser import Tab, address
from tests.servers.firefox import firefox
from tests.servers.rest import Rest
from tests.support import RECIPE
from tests.system.test_report_page import PROGRAM
from tests.system.test_report_page import RECIPE as HOSTILE

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
      while :; do n=$((n + 1)); echo "{\\"step\\": $n, \\"loss\\": $n}" >> $RECIPE_METRICS; echo point $n of {{ inputs.title }}; sleep 0.05; done; touch {{ outputs.o }}
    metrics: true
    outputs: {o: train.txt}
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("page") / "space"
    root.mkdir()
    (root / "grow.yaml").write_text(GROW)
    (root / "hostile.yaml").write_text(
        "recipe: hostile@1\nsummary: <img src=x onerror=window.__xss=8>" + HOSTILE
    )
    (root / "train.py").write_text(PROGRAM)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./grow.yaml", "./hostile.yaml"]\n')
    with Rest(root, "--with-worker") as server:
        yield server


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
    page.click(".card >> text=grow@1")
    page.fill("[data-name=title]", "Ann's run")
    page.fill("[data-name=rate]", "much")
    assert "must be a number" in page.wait_for_selector("[data-wrong=rate]").inner_text()
    page.click("#go")
    assert page.evaluate("document.activeElement.id") == "input-rate", "nothing is stored"
    page.fill("[data-name=rate]", "0.25")
    assert "2 of 2 steps would run" in page.wait_for_selector("#tallied-steps").inner_text()
    page.click("#go")
    curve = "[data-metric=loss]"
    page.wait_for_selector(f"{curve} canvas")
    points = int(page.get_attribute(curve, "data-points"))
    tab.until(
        "n => Number(document.querySelector('[data-metric=loss]').dataset.points) > n + 20", points
    )
    page.reload()
    page.wait_for_selector(f"{curve} canvas")
    assert (
        page.locator("#steps g").count() == 2
        and page.locator("#steps [aria-label^='… train running, ']").count() == 1
        and tab.fits()
    )
    page.click("#tab-log")
    tab.until("() => document.getElementById('text')?.textContent.includes(\"of Ann's run\")")
    (run,) = rest.get("/v1/runs")["runs"]
    assert run["inputs"]["rate"] == 0.25
    while rest.get("/v1/runs")["runs"][0]["metrics"]["loss"]["last"] <= 20:
        page.wait_for_timeout(50)  # the numbers of a run that goes on are in the list, too
    silent = rest.ask("GET", f"/v1/runs/{run['id']}/logs?step=first&follow=true")
    assert (silent.status_code, silent.text) == (200, ""), (
        "a step that is over and printed nothing has an empty log"
    )
    page.focus("[data-verb=cancel]")
    page.keyboard.press("Enter")
    page.click("[data-verb=cancel] >> text=Really")
    tab.until("() => document.getElementById('chip').textContent.includes('cancelled')")
    page.wait_for_selector("[data-verb=retry]")
    page.click(".back")
    page.wait_for_selector("#runs >> text=cancelled")
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
    page.wait_for_selector(".multiple canvas")
    assert page.inner_text("#chip") == "✗ failed" and "train[lr=2]" in page.inner_text("#failed")
    assert page.locator("#steps [aria-label^='✗ train ×3 1 failed, 2 done']").count() == 1
    page.click("#tab-curves")
    page.fill("#metrics", "onerror")
    assert page.locator(".multiple").count() == 1 and "</script><img" in page.inner_text(
        ".multiple"
    )
    page.click("#log-y")
    page.click("#tab-samples")
    page.wait_for_selector("#samples img", state="attached")
    tab.until("() => document.querySelectorAll('#samples img').length === 2")
    assert "fake.png" not in page.inner_html("#samples")
    page.click("#tab-log")
    tab.until("() => document.getElementById('text')?.textContent.includes('diverged')")
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
    page.click("#tab-details")
    assert "</title><script>window.__xss=6</script>" in page.text_content("#given")
    assert page.evaluate("window.__xss === undefined") and tab.fits() and tab.said == []
    assert not (faults := tab.faults()), "\n".join(faults)
    assert (
        page.evaluate(
            "(() => { try { document.body.innerHTML = '<b>'; return 'markup'; } catch (error) { return error.name; } })()"
        )
        == "TypeError"
    )
    page.goto(f"{rest.url}/#new")
    page.reload()
    page.click(".card >> text=hostile@1")
    page.wait_for_selector("main >> text=onerror=window.__xss=8")
    assert page.evaluate("window.__xss === undefined") and tab.fits()
    assert not (faults := tab.faults()), "\n".join(faults)


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


def test_a_browser_that_has_a_file_of_the_page_is_not_sent_it_again(rest: Rest) -> None:
    plain = rest.ask("GET", "/page/app.js", token="", headers={"Accept-Encoding": "identity"})
    packed = rest.ask("GET", "/page/app.js", token="", stream=True)
    assert packed.headers["content-encoding"] == "gzip" and packed.text == plain.text
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert (plain.headers["cache-control"], plain.headers["vary"]) == (
        "no-cache",
        "accept-encoding",
    )
    tag = plain.headers["etag"]
    known = rest.ask("GET", "/page/app.js", token="", headers={"If-None-Match": f'"x", W/{tag}'})
    assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", tag)
    assert rest.get("/v1/runs"), "an answer of data is never kept by a browser"
    assert rest.ask("GET", "/v1/runs").headers["cache-control"] == "no-store"


def test_the_parts_of_others_are_those_that_were_published() -> None:
    vendor = HERE / "vendor"
    parts = json.loads((vendor / "vendor.json").read_text())
    named = {name for part in parts for name in part["files"]}
    assert named == {path.name for path in vendor.iterdir()} - {"vendor.json"}
    for part in parts:
        assert part["integrity"].startswith("sha512-") and part["license"] in ("MIT", "Apache-2.0")
        (licence,) = (name for name in part["files"] if name.endswith(".LICENSE"))
        assert {"MIT": "MIT", "Apache-2.0": "Apache License"}[part["license"]] in (
            vendor / licence
        ).read_text()
        for name, file in part["files"].items():
            assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == file["sha256"], name


def test_a_module_that_the_bundle_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "a.js").write_text('import { b } from "./b.js";\n')
    (tmp_path / "app" / "b.js").write_text('import { a } from "./a.js";\nexport const b = 1;\n')
    (tmp_path / "app" / "c.js").write_text("export default 1;\n")
    monkeypatch.setattr(bundle, "HERE", tmp_path)
    with pytest.raises(ValueError, match="a -> b -> a"):
        bundle.script("a")
    with pytest.raises(ValueError, match=r"c\.js: .*export default 1;"):
        bundle.script("c")


def test_the_page_is_light_to_send() -> None:
    files = [
        bundle.libraries(),
        bundle.script("app"),
        bundle.style("base.css", "app.css", "outputs.css"),
    ]
    assert sum(len(gzip.compress(file.encode())) for file in files) < 110_000


def test_the_token_of_the_page_stops_runs_and_makes_no_tokens(rest: Rest) -> None:
    token = address(rest).partition("token=")[2]
    assert rest.ask("GET", "/v1/runs", token=token).status_code == 200
    assert rest.ask("POST", "/v1/tokens", {"scope": "read"}, token=token).status_code == 403


def test_firefox_shows_runs_and_the_curves_of_one(rest: Rest) -> None:
    if not (failed := rest.get("/v1/runs?state=FAILED")["runs"]):
        failed = [rest.until(rest.submit("hostile"), "FAILED")]
    with firefox("dark") as tab:
        tab.open(address(rest), 1280)
        tab.until("window.ready && document.querySelector('#runs tbody tr')")
        tab.look(f"location.hash = 'run={failed[0]['id']}'")
        tab.until("document.querySelector('.multiple canvas') && document.querySelector('#failed')")
        tab.look("document.getElementById('tab-log').click()")
        tab.until("document.getElementById('text')?.textContent.includes('diverged')")
        assert tab.look("window.__xss === undefined") and tab.said == []
        assert {f"http://{urlsplit(url).netloc}" for url in tab.asked} == {rest.url}


def test_a_page_without_a_server_has_one_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "grow.yaml").write_text(GROW)
    process = subprocess.Popen(
        [*RECIPE, "ui", "--no-open"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("page: http://127.0.0.1:")
        url, _, token = said.removeprefix("page: ").strip().partition("/#token=")
        offered = requests.get(
            f"{url}/v1/recipes", headers={"Authorization": f"Bearer {token}"}, timeout=30
        ).json()["recipes"]
        assert [each["file"] for each in offered if each["file"]] == ["./grow.yaml"]
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
