"""Runs and trials compared in a browser: curves with one cursor and zoom, results against a baseline, inputs on parallel axes; 20 curves of 10,000 points."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from runner.interface.cli.main import main
from runner.survey import binned
from tests.servers.browser import Tab
from tests.servers.rest import Rest
from tests.support import RECIPE

POINTS = 10_000
PEAK = 4321
LONG = """\
recipe: long@1
summary: Fit for long, with one peak that thinning must not hide.
inputs:
  rate: {type: number, default: 0.1}
  seed: {type: integer, default: 1}
steps:
  fit:
    run: |
      python3 -c "
      import math, os
      rate, seed, out = {{ inputs.rate }}, {{ inputs.seed }}, open(os.environ['RECIPE_METRICS'], 'w')
      for n in range(POINTS):
          loss = 3 * math.exp(-rate * n / 900) + rate / 10 + 0.01 * (n * seed % 7) + 50 * (n == PEAK)
          print('{%cstep%c: %d, %closs%c: %r, %cval_loss%c: %r, %cscore%c: %r, %ctime_step%c: 0.01}' % (34, 34, n, 34, 34, loss, 34, 34, loss * 1.1, 34, 34, 1 - loss, 34, 34), file=out)
      "
      echo x > {{ outputs.o }}
    metrics: true
    outputs: {o: fit.txt}
""".replace("POINTS", str(POINTS)).replace("PEAK", str(PEAK))
RATES, SEEDS = "0.1,0.2,0.4,0.6,0.8,1,1.5,2,3,4", "1,2"


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("compare") / "space"
    root.mkdir()
    (root / "long.yaml").write_text(LONG)
    (root / "recipe.toml").write_text("")
    assert main(["sweep", "-C", str(root), "./long.yaml", f"rate={RATES}", f"seed={SEEDS}"]) == 0
    with Rest(root) as server:
        yield server


@pytest.fixture(scope="module")
def sweep(rest: Rest) -> str:
    """The sweep, once the numbers of all its trials are known."""
    deadline = time.monotonic() + 60
    while True:
        (run,) = rest.get("/v1/runs")["runs"]
        if len(run["trials"]) == 20 and all(each["metrics"] for each in run["trials"]):
            return str(run["id"])
        assert time.monotonic() < deadline, run


def opened(browser: Any, where: str, view: str, width: int = 1280, scheme: str = "light") -> Tab:
    tab = Tab(browser, width, scheme)
    tab.page.goto(f"{where}&{view}")
    tab.until("() => document.querySelectorAll('.multiple canvas').length >= 3")
    return tab


def trial(sweep: str, rate: object, seed: int = 1) -> str:
    return f"{sweep}!long[rate={rate},seed={seed}]"


def test_twenty_curves_of_ten_thousand_points_open_at_once_and_a_zoom_shows_their_peak(
    browser: Any, where: str, sweep: str
) -> None:
    tab = Tab(browser, 1280, "light")
    page = tab.page
    page.goto(where)
    tab.until("window.ready")
    begun = time.monotonic()
    page.evaluate("id => { location.hash = 'compare=' + id; }", sweep)
    page.wait_for_selector(".multiple:nth-child(3) canvas")
    whole = time.monotonic() - begun
    page.evaluate(WATCH)
    over = page.locator(".multiple[data-metric=loss] .u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] * 0.42, over["y"] + 40)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.45, over["y"] + 40, steps=3)
    begun = time.monotonic()
    page.mouse.up()
    page.wait_for_selector("#unzoom")
    tab.until("() => window.answered === 1")
    zoomed = time.monotonic() - begun
    print(json.dumps({"open": round(whole, 2), "zoom": round(zoomed, 2)}))
    low, high = (float(each.replace(" ×", "")) for each in page.inner_text("#unzoom").split(" – "))
    assert 4100 < low < PEAK < high < 4600
    assert whole < 8 and zoomed < 1.5 and tab.said == []
    page.click("#unzoom")
    page.wait_for_selector("#unzoom", state="detached")


WATCH = """() => {
  window.answered = 0;
  new PerformanceObserver(list => {
    window.answered += list.getEntries().filter(each => each.name.includes("low=")).length;
  }).observe({ type: "resource" });
}"""


def test_results_open_where_their_runs_are_compared(rest: Rest, browser: Any, sweep: str) -> None:
    said = subprocess.run(
        [*RECIPE, "results", "--open"], cwd=rest.root, capture_output=True, text=True, check=True
    )
    url = said.stdout.removeprefix("page: ").strip()
    assert url.startswith(f"{rest.url}/#token=rcp_") and url.endswith(f"&compare={sweep}")
    tab = Tab(browser, 1280, "light")
    tab.page.goto(url)
    assert tab.page.wait_for_selector("#compare h1").inner_text() == "Compare 20 trials"


def test_a_sweep_is_compared_from_the_table_by_keys(browser: Any, where: str, sweep: str) -> None:
    tab = Tab(browser, 1280, "light")
    tab.page.goto(where)
    tab.until("window.ready")
    for key in "jxc":
        tab.page.keyboard.press(key)
    assert tab.page.wait_for_selector("#compare h1").inner_text() == "Compare 20 trials"
    tab.page.wait_for_selector(".multiple[data-metric=val_loss] canvas")
    tab.page.reload()
    tab.page.wait_for_selector(".multiple[data-metric=val_loss] canvas")
    assert tab.page.locator(".legend li").count() == 20 and tab.fits() and tab.said == []


def test_results_show_the_best_and_how_far_from_the_baseline(
    browser: Any, where: str, sweep: str
) -> None:
    chosen = " ".join([trial(sweep, 0.4), trial(sweep, 1), trial(sweep, 4)])
    tab = opened(browser, where, f"compare={chosen}")
    page = tab.page
    page.select_option("#baseline", label="rate=1")
    loss = page.locator("#results-of tr[data-metric=loss] td").all_inner_texts()
    assert [each[:4].strip() for each in loss] == ["0.07", "0.1", "0.4+"]
    assert "best" in loss[0] and "−0.0247" in loss[0] and "+0.3" in loss[2]
    score = page.locator("#results-of tr[data-metric=score] td").all_inner_texts()
    assert "best" in score[0], "more of a score is better"
    inputs = page.locator("#inputs-of tbody th").all_inner_texts()
    assert inputs == ["rate"], "only what differs"
    page.uncheck("#inputs-of input")
    assert page.locator("#inputs-of tbody th").all_inner_texts() == ["rate", "seed"]
    page.click("[aria-label='leave out rate=4']")
    assert page.locator(".legend li").count() == 2 and "rate%3D4" not in page.url
    assert "pin=" in page.url and tab.said == []


def test_ranges_of_numbers_and_the_mouse_narrow_what_is_drawn(
    browser: Any, where: str, sweep: str
) -> None:
    tab = opened(browser, where, f"compare={sweep}")
    page = tab.page
    page.fill("[aria-label='least rate']", "1")
    assert page.locator(".thread:not(.out)").count() == 10 == page.locator(".legend li.out").count()
    page.fill("[aria-label='least rate']", "")
    grip = page.locator(".parallel .grip").first
    grip.scroll_into_view_if_needed()
    box = grip.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] * 0.4)
    page.mouse.up()
    drawn = page.locator(".thread:not(.out)").count()
    assert 0 < drawn < 20 and float(page.input_value("[aria-label='least rate']")) > 0.3
    page.select_option("#group", "rate")
    page.wait_for_selector(".multiple canvas")
    for axis in ("elapsed", "at", "seconds"):
        with page.expect_response(lambda answer, axis=axis: f"x={axis}" in answer.url):
            page.select_option("#axis", axis)
        page.wait_for_selector(".multiple canvas")
    tab.until("() => document.querySelectorAll('.multiple canvas').length >= 3")
    assert "axis=seconds" in page.url and "group=rate" in page.url and tab.said == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    browser: Any, where: str, sweep: str, width: int, scheme: str
) -> None:
    tab = opened(browser, where, f"compare={trial(sweep, 1)} {trial(sweep, 2)}", width, scheme)
    tab.page.locator(".legend a").first.focus()
    tab.page.keyboard.press("Tab")
    tab.page.locator(".multiple button").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector(".multiple.tall canvas")
    assert not (faults := tab.faults()), "\n".join(faults)
    assert tab.fits() and tab.said == []


def test_bins_keep_the_extremes_of_every_part(rest: Rest, sweep: str) -> None:
    ask = f"/v1/runs/{sweep}/metrics?metric=loss&step=long[rate=1,seed=1]/fit"
    (whole,) = map(json.loads, rest.ask("GET", f"{ask}&bins=50").text.splitlines())
    assert whole["n"] == POINTS and 50 <= len(whole["x"]) <= 102 and PEAK in whole["x"]
    (close,) = map(
        json.loads, rest.ask("GET", f"{ask}&bins=50&low=4300&high=4340").text.splitlines()
    )
    assert close["x"] == list(range(4299, 4342)), "every point, and the next outside at each end"
    (timed,) = map(json.loads, rest.ask("GET", f"{ask}&bins=50&x=seconds").text.splitlines())
    assert timed["x"][-1] == pytest.approx(POINTS * 0.01)
    run = rest.get(f"/v1/runs/{sweep}")
    begun, over = (datetime.fromisoformat(run[each]).timestamp() for each in ("created", "ended"))
    (dated,) = map(json.loads, rest.ask("GET", f"{ask}&bins=50&x=at").text.splitlines())
    assert begun - 1 < dated["x"][0] < dated["x"][-1] < over + 1 and max(dated["y"]) > 50
    (since,) = map(json.loads, rest.ask("GET", f"{ask}&bins=50&x=elapsed").text.splitlines())
    assert since["x"][0] == 0 and since["x"][-1] < over - begun + 1 and since["y"] == dated["y"]
    for bad in ("bins=-1", "bins=50&low=nan", "x=hours&bins=5"):
        assert rest.ask("GET", f"{ask}&{bad}").status_code == 422


def test_points_have_the_times_at_which_the_machine_was_seen_at_their_steps() -> None:
    points = [{"step": n, "loss": 1 / (n + 1)} for n in range(0, 50, 10)]
    seen = [{"at": 105.0}, {"step": 10, "at": 110.0}, {"step": 10, "at": 115.0}]
    seen += [{"step": 30, "at": 120.0}, {"step": 20, "at": 125.0}]
    span = binned.Span(100.0, 140.0)
    times = [each["at"] for each in binned.time_points(points, seen, span)]
    assert times == [105, 110, 115, 120, 140], "it was still loading at 105"
    assert [each["at"] for each in binned.time_points(points[:2], [], span)] == [100, 140]
    assert binned.time_points(points, [], binned.Span()) == [] == binned.time_points([], seen, span)
    assert [each["at"] for each in binned.time_points(points[:1], [], binned.Span(7.0))] == [7.0]
    timed = [
        {**each, "elapsed": each["at"] - 100} for each in binned.time_points(points, seen, span)
    ]
    assert binned.build_curves(timed, "elapsed")["loss"].x == [5, 10, 15, 20, 40]
    assert list(binned.build_curves(timed, "at")) == ["loss"]
    assert "elapsed" in binned.build_curves([{"elapsed": 3}], "step"), "a metric may be called so"


def test_a_step_that_went_back_is_one_curve_of_what_it_reported_last() -> None:
    said = [{"step": 1, "a": 5.0}, {"step": 2, "a": 4.0}, {"step": 2, "a": 3}, {"step": 1, "b": 1}]
    found = binned.build_curves([*said, {"step": 0, "a": 9.0, "word": "x", "time_step": 2}], "step")
    assert found == {"a": ([0, 1, 2], [9.0, 5.0, 3]), "b": ([1], [1])}
    assert binned.build_curves(said, "seconds") == {}
    regular = [{"step": n, "a": n / 2, "epoch": 1} for n in range(5)]
    quick = binned.build_curves(regular, "step")
    assert quick == binned.build_curves([*regular, {"step": 4, "word": "x"}], "step")
    assert quick == {"a": ([0, 1, 2, 3, 4], [0.0, 0.5, 1.0, 1.5, 2.0])}
