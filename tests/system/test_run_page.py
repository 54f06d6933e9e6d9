"""One run in a browser: a failure with the way on, a run that goes on, its machine, and its log; by keys alone, on a phone, and with hostile names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from runner.interface.cli.main import main
from runner.interface.page import bundle
from tests.servers.browser import Tab
from tests.servers.page_space import EVIL
from tests.servers.rest import Rest

RECIPE = """\
recipe: live@1
summary: Train a small model for as long as asked.
inputs:
  rate: {type: number, default: 0.1}
  count: {type: integer, default: 300}
  pause: {type: number, default: 0}
  crash: {type: integer, default: 0}
steps:
  data: {run: 'seq 9 > {{ outputs.o }}', outputs: {o: data.txt}}
  train:
    run: [python3, train.py, "{{ inputs.rate }}", "{{ inputs.count }}", "{{ inputs.pause }}", "{{ inputs.crash }}", "{{ steps.data.o }}", "{{ outputs.o }}"]
    code: [train.py]
    metrics: true
    retries: 1
    outputs: {o: model.txt}
  report: {run: 'cp {{ steps.train.o }} {{ outputs.o }}', outputs: {o: report.txt}}
"""
PROGRAM = f"""\
import json, os, sys, time
rate, count, pause, crash = float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
told = open(os.environ["RECIPE_METRICS"], "a", buffering=1)
evil = {EVIL!r}
print("\\x1b[1;32mloading\\x1b[0m data, " + evil, flush=True)
told.write(json.dumps({{"warning": "rows were cut " + evil}}) + "\\n")
if crash:
    print("\\n".join(f"row {{n}}" for n in range(1, 30001)))
for n in range(1, count + 1):
    told.write(json.dumps({{"step": n, "max_steps": count, "loss": 3 / n + rate, evil: n}}) + "\\n")
    print(f"\\r{{n}}/{{count}}", end="" if n % 10 else "\\n", flush=True)
    if n == crash:
        sys.exit("\\x1b[31mTraceback (most recent call last):\\x1b[0m\\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB " + evil)
    time.sleep(pause)
open(sys.argv[6], "w").write("x")
"""
TABS = ("overview", "curves", "machine", "log", "samples", "outputs", "details")


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("run") / "space"
    root.mkdir()
    (root / "live.yaml").write_text(RECIPE)
    (root / "train.py").write_text(PROGRAM)
    (root / "recipe.toml").write_text('[recipes]\nallow = ["./live.yaml"]\n')
    assert main(["run", "-C", str(root), "./live.yaml", "crash=40"]) == 1
    with Rest(root, "--with-worker") as server:
        yield server


@pytest.fixture(scope="module")
def failed(rest: Rest) -> str:
    (run,) = rest.get("/v1/runs?state=FAILED")["runs"]
    return str(run["id"])


@pytest.fixture(scope="module")
def live(rest: Rest) -> Iterator[str]:
    """A run that goes on for as long as the tests take."""
    run = rest.submit("live", inputs={"pause": 0.05, "count": 20000})
    rest.until(run, "ACTIVE")
    yield run
    rest.ask("POST", f"/v1/runs/{run}/cancel", {})


def opened(browser: Any, where: str, view: str, width: int = 1280, scheme: str = "light") -> Tab:
    tab = Tab(browser, width, scheme)
    tab.page.goto(f"{where}&{view}")
    tab.page.wait_for_selector("#run h1")
    return tab


def number(tab: Tab, selector: str, attribute: str) -> int:
    return int(tab.page.get_attribute(selector, attribute) or 0)


LAST_LINE = "() => Number([...document.querySelectorAll('.log-line .n')].at(-1)?.textContent || 0)"


def test_a_failure_comes_first_with_its_last_lines_and_the_way_on(
    browser: Any, where: str, failed: str
) -> None:
    tab = opened(browser, where, f"run={failed}")
    page = tab.page
    box = page.wait_for_selector("#failed .failure")
    said = box.inner_text()
    assert "oom, exit 1" in said and "CUDA out of memory" in said and "smaller batch" in said
    assert box.bounding_box()["y"] < page.locator("#steps").bounding_box()["y"]
    assert page.inner_text(".last-lines .ansi-red") == "Traceback (most recent call last):"
    page.wait_for_selector("#failed >> text=Rerun with changes")
    assert page.get_attribute("#failed a[href*=new]", "href") == f"#new&like={failed}"
    assert page.inner_text("#tally") == "3 steps: 1 failed, 1 done, 1 blocked"
    assert page.inner_text("#warnings li").startswith("train rows were cut </script><img")
    page.wait_for_selector("#steps [aria-label^='✗ train failed, oom no earlier run']")
    page.click("#failed >> text=Whole log")
    page.wait_for_selector(".log-line")
    assert page.input_value("#log-step") == "train" and page.input_value("#log-attempt") == "2"
    page.select_option("#log-attempt", "1")
    tab.until("() => location.hash.includes('attempt=1')")
    page.wait_for_selector(".log-line")
    assert tab.said == [] and page.evaluate("window.__xss === undefined")


def test_a_run_is_paused_resumed_and_cancelled_by_keys(
    rest: Rest, browser: Any, where: str
) -> None:
    run = rest.submit("live", inputs={"pause": 0.05, "count": 20001})
    tab = opened(browser, where, f"run={run}")
    page = tab.page
    for verb, word in (("pause", "paused"), ("resume", "executing"), ("cancel", "cancelled")):
        page.wait_for_selector(f"[data-verb={verb}]:not([disabled])").focus()
        page.keyboard.press("Enter")
        if verb == "cancel":
            page.wait_for_selector("text=Really cancel?")
            page.keyboard.press("Enter")
        tab.until("word => document.getElementById('chip').textContent.includes(word)", word)
    assert tab.said == []


def test_the_whole_log_is_searched_and_a_line_has_an_address(
    browser: Any, where: str, failed: str
) -> None:
    tab = opened(browser, where, f"run={failed}&tab=log&step=train")
    page = tab.page
    page.wait_for_selector(".log-line >> text=CUDA out of memory")
    assert re.fullmatch(r"lines 29,5\d\d–30,007 of 30,007", page.inner_text("#logged"))
    page.fill("#find", "ROW 17")
    tab.until(
        "() => document.getElementById('logged').textContent.startsWith('1,111 of 30,007 lines')"
    )
    assert page.inner_text("mark >> nth=0") == "row 17" and page.locator(".log-line").count() == 500
    page.click(".log-line:nth-child(3) .n")
    page.wait_for_selector(".log-line.lit >> text=row 171")
    assert page.url.endswith("line=172") and page.locator(".log-line").count() > 400
    page.reload()
    page.wait_for_selector(".log-line.lit >> text=row 171")
    assert page.locator(".log-line.lit").is_visible(), "a link to a line shows it"
    first = page.inner_text(".log-line .n >> nth=0")
    page.click("#earlier")
    page.wait_for_selector("#L1 >> text=loading")
    assert (
        int(first) > 1 and page.get_attribute("#L1 .ansi-green", "class") == "ansi-green ansi-bold"
    )
    assert "<img src=x" in page.inner_text("#L1") and "<U+202E>" in page.inner_text("#L1")
    page.click("#later")
    tab.until("() => document.querySelectorAll('.log-line').length > 900")
    page.click("#to-end")
    page.wait_for_selector(".log-line >> text=40/300")
    assert not page.locator("text=39/300").count(), "what a progress bar wrote over is gone"
    page.click("#errors")
    tab.until("() => document.getElementById('logged').textContent.startsWith('2 of 30,007 lines')")
    assert tab.said == [] and page.evaluate("window.__xss === undefined")


def test_a_log_of_each_node_can_be_chosen(
    rest: Rest, browser: Any, where: str, failed: str
) -> None:
    other = rest.root / ".recipe" / "runs" / failed / "train.2.1.log"
    assert other.with_name("train.2.log").exists()
    other.write_text("from the other node\n")
    tab = opened(browser, where, f"run={failed}&tab=log&step=train")
    tab.page.wait_for_selector("#log-node")
    tab.page.select_option("#log-node", "1")
    tab.page.wait_for_selector("#L1 >> text=from the other node")
    asked = f"/v1/runs/{failed}/logs/lines?step=train"
    assert rest.get(f"{asked}&node=1")["nodes"] == 2 and tab.said == []
    assert rest.ask("GET", f"{asked}&attempt=9").status_code == 404
    assert rest.ask("GET", f"{asked}&node=64").status_code == 422
    other.unlink()


def test_a_run_goes_on_before_ones_eyes_and_after_a_reload_in_each_tab(
    browser: Any, where: str, live: str
) -> None:
    tab = opened(browser, where, f"run={live}")
    page = tab.page
    page.wait_for_selector(".multiple canvas")
    page.wait_for_selector("#steps [aria-label^='… train running, ']")
    loss = "[data-metric=loss]"
    more = f"n => Number(document.querySelector('{loss}').dataset.points) > n"
    for _ in range(2):
        tab.until(more, number(tab, loss, "data-points") + 5)
        page.reload()
        page.wait_for_selector(f"{loss} canvas")
    page.click("#tab-log")
    page.wait_for_selector(".log-line")
    for _ in range(2):
        tab.until(f"n => ({LAST_LINE})() > n", page.evaluate(LAST_LINE) + 1)
        page.reload()
        page.wait_for_selector(".log-line")
    page.click("#tab-machine")
    page.wait_for_selector("[data-metric=CPU] canvas")
    page.reload()
    page.wait_for_selector("[data-metric=Memory] canvas")
    assert "tab=machine" in page.url and tab.fits() and tab.said == []
    assert not any(re.search(r"/metrics\?(?!bins|of=machine)", url) for url in tab.asked), (
        "no points are asked for again and again"
    )


def test_tabs_of_one_browser_share_a_stream_and_the_next_takes_it_over(
    browser: Any, where: str, live: str
) -> None:
    first = opened(browser, where, f"run={live}")
    first.page.wait_for_selector(".multiple canvas")
    second = first.context.new_page()
    asked: list[str] = []
    second.on("request", lambda request: asked.append(request.url))
    second.goto(f"{where}&run={live}")
    second.wait_for_selector(".multiple canvas")
    points = "() => Number(document.querySelector('[data-metric=loss]').dataset.points)"
    before = second.evaluate(points)
    first.until(f"n => ({points})() > n", first.page.evaluate(points) + 5)
    while second.evaluate(points) <= before:  # both go on
        second.wait_for_timeout(50)
    streams = [url for url in asked if "/stream" in url]
    assert streams == [] and sum("/stream" in url for url in first.asked) == 1
    first.page.close()
    before = second.evaluate(points)
    while second.evaluate(points) <= before + 5 or not any("/stream" in url for url in asked):
        second.wait_for_timeout(50)
    first.context.close()


def test_a_rented_gpu_is_shown_over_time_with_its_cost(
    browser: Any, where: str, failed: str
) -> None:
    rented = {"provider": "fake", "key": EVIL, "state": "UP", "usd_an_hour": 2.5}
    spent = {"instances": [rented], "cost": 1.25}
    numbers = {"gpu_utilization_percent": [80, 91], "gpu_memory_used_gb": [20.5, 22.1]}
    lines = [
        json.dumps({"step": "train", "metric": name, "n": 2, "x": [1.7e9, 1.7e9 + 5], "y": y})
        for name, y in numbers.items()
    ]
    tab = Tab(browser, 1280, "light")
    page = tab.page
    page.route(
        f"**/v1/runs/{failed}", lambda route: route.fulfill(json=route.fetch().json() | spent)
    )
    page.route("**/metrics?of=machine*", lambda route: route.fulfill(body="\n".join(lines)))
    page.goto(f"{where}&run={failed}&tab=machine")
    page.wait_for_selector("[data-metric=GPU] canvas")
    assert page.inner_text("[data-metric=GPU] .near") == "91 %"
    assert page.inner_text("[data-metric='GPU memory'] .near") == "22.1 GB"
    assert "$1.25 so far" in page.inner_text("#facts") and "$2.50 an hour" in page.inner_text(
        "#facts"
    )
    assert "up, $2.50/h" in page.inner_text("#machine") and EVIL[:20] in page.inner_text("#machine")
    assert tab.fits() and tab.said == [] and not (faults := tab.faults()), "\n".join(faults)


def test_a_token_that_only_reads_has_no_buttons(
    rest: Rest, browser: Any, failed: str, live: str
) -> None:
    secret = rest.ask("POST", "/v1/tokens", {"scope": "read"}).json()["token"]
    assert rest.get("/v1/me", token=secret) == {
        "name": "",
        "scope": "read",
        "run": "",
        "expires": None,
    }
    for run in (failed, live):
        tab = Tab(browser, 1280, "light")
        tab.page.goto(f"{rest.url}/#token={secret}&run={run}")
        tab.page.wait_for_selector(".multiple canvas")
        assert tab.page.locator("#run button:not(.multiple button)").count() == 0
        assert tab.page.locator("a[href*='like=']").count() == 0 and tab.said == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    rest: Rest, browser: Any, where: str, failed: str, live: str, width: int, scheme: str
) -> None:
    tab = opened(browser, where, f"run={failed}", width, scheme)
    page = tab.page
    faults = []
    for run in (failed, live):
        page.goto(f"{rest.url}/#run={run}")
        page.wait_for_selector("#steps g")
        for name in TABS:
            page.focus(f"#tab-{name}")
            page.keyboard.press("Enter")
            page.wait_for_selector(f"#tab-{name}[aria-current=page]")
            page.wait_for_selector(f"{READY[name]}", state="attached")
            faults += [f"{name}: {each}" for each in tab.faults()]
            assert tab.fits(), name
    assert not faults, "\n".join(faults)
    assert tab.said == [] and page.evaluate("window.__xss === undefined")
    assert {urlsplit(url).netloc for url in tab.asked} == {urlsplit(rest.url).netloc}


READY = {
    "overview": "#steps g",
    "curves": ".multiple canvas",
    "machine": ".multiple canvas, .empty",
    "log": ".log-line",
    "samples": "#run",
    "outputs": "#run",
    "details": "#events tr",
}


def test_each_field_that_finds_takes_words_and_a_regex(browser: Any) -> None:
    page = browser.new_page()
    script = (
        bundle.script("find").removesuffix("})();\n") + "window.found = findModule.matcher;\n})();"
    )
    page.evaluate(f"() => {{ {script} }}")
    names = ["eval_loss", "loss", "grad norm", "lr"]
    for typed, left in {
        "": names,
        "LOSS": names[:2],
        "loss -eval": ["loss"],
        "/^l/": ["loss", "lr"],
        "-/o/": ["lr"],
        '"d n"': ["grad norm"],
        "/(/": [],
        "-": [],
    }.items():
        assert page.evaluate("([all, typed]) => all.filter(found(typed))", [names, typed]) == left
    page.close()


def test_a_curve_in_memory_keeps_its_extremes_and_stays_small(browser: Any) -> None:
    page = browser.new_page()
    script = (
        bundle.script("lines").removesuffix("})();\n") + "window.Line = linesModule.Line;\n})();"
    )
    page.evaluate(f"() => {{ {script} }}")
    found = page.evaluate(
        """() => {
          const line = new Line();
          for (let n = 0; n < 100000; n++) line.put(n, n === 777 ? 50 : n === 60000 ? -50 : Math.sin(n));
          line.put(99999, 7);
          return [line.size, Math.max(...line.y), Math.min(...line.y), line.x[0], line.x.at(-1), line.y.at(-1), line.x.every((x, n) => !n || line.x[n - 1] < x), line.x.filter(x => x < 50000).length];
        }"""
    )
    size, most, least, first, last, at_end, in_order, before_half = found
    assert size <= 2000 and (most, least) == (50, -50), "peaks of long ago are there"
    assert (first, last, at_end, in_order) == (0, 99999, 7, True)
    assert before_half > 300, "what is long ago is not thinner than what is new"
    page.close()


def test_the_table_of_runs_follows_a_stream_and_asks_for_nothing_while_nothing_happens(
    rest: Rest, browser: Any, where: str
) -> None:
    tab = Tab(browser, 1280, "light")
    page = tab.page
    page.goto(where)
    tab.until("window.ready")
    run = rest.submit("live", inputs={"count": 3, "rate": 0.7})
    page.wait_for_selector(f"a[href*='{run}']")
    rest.ask("PATCH", f"/v1/runs/{run}", {"name": "renamed elsewhere"})
    page.wait_for_selector("text=renamed elsewhere")
    rest.ask("POST", f"/v1/runs/{run}/cancel", {})
    page.wait_for_selector(f"tr:has(a[href*='{run}']) >> text=cancelled")
    assert sum("/v1/stream" in url for url in tab.asked) == 1 and tab.said == []
