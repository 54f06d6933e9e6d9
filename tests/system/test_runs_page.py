"""The table of all runs in a browser: found, sorted, compared with a baseline, named, put away; by keys alone, on a phone, and with 2,000 of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.browser import Tab
from tests.servers.page_space import EVIL, many, seeded
from tests.servers.rest import Rest
from tests.support import until


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("runs") / "space"
    seeded(root)
    with Rest(root) as server:
        yield server


def opened(browser: Any, where: str, width: int = 1280, scheme: str = "light") -> Tab:
    tab = Tab(browser, width, scheme)
    tab.page.goto(where)
    tab.until("window.ready")
    return tab


def names(tab: Tab) -> list[str]:
    """What the rows are called, from above."""
    return list(tab.page.locator("[data-run] a.row").all_inner_texts())


def column(tab: Tab, name: str) -> list[str]:
    """The cells of a column, of rows that are no trials."""
    heads = [
        each.split(" ")[0].split("\n")[0]
        for each in tab.page.locator("#runs thead th").all_inner_texts()
    ]
    n = heads.index(name) + 1
    return [
        each.strip()
        for each in tab.page.locator(
            f"#runs tbody tr[data-run] > :nth-child({n})"
        ).all_inner_texts()
    ]


@pytest.mark.parametrize(
    ("typed", "left"),
    [
        ("rate>0.25", 5),
        ("rate>=0.3 rate<9", 4),
        ("val_loss<0.6", 4),
        ("status:failed", 1),
        ("-status:failed recipe:fit@1", 4),
        ("recipe:sweep", 1),
        ("kind=sgd", 1),
        ('kind:"<b>li"', 1),
        ("tag:base", 1),
        ("#base", 1),
        ("/fit-s.*p@1|pick/", 2),
        ("lion -sweep", 1),
        ("is:sweep", 2),
        ("is:archived", 0),
        ("nothing-like-this", 0),
    ],
)
def test_the_filter_finds(shared: Tab, typed: str, left: int) -> None:
    shared.page.fill("#query", typed)
    shared.until(f"() => document.getElementById('tallied').textContent === '{left} of 7 runs'")
    assert len(names(shared)) == left and shared.said == []


@pytest.fixture(scope="module")
def shared(browser: Any, where: str) -> Tab:
    """A tab that tests type into."""
    return opened(browser, where)


def test_a_regex_that_cannot_be_read_is_said_and_hides_nothing(shared: Tab) -> None:
    shared.page.fill("#query", "/(/")
    assert "Invalid /regex/" in shared.page.inner_text("#query-error") and len(names(shared)) == 7
    shared.page.fill("#query", "")


def test_chips_count_states_and_keep_the_rest_of_the_filter(shared: Tab) -> None:
    page = shared.page
    page.fill("#query", "recipe:fit@1")
    assert page.locator(".state-chip").all_inner_texts() == ["completed 4", "failed 1"]
    page.click(".state-chip.failed")
    assert page.input_value("#query") == "recipe:fit@1 status:failed" and len(names(shared)) == 1
    assert page.locator(".state-chip").all_inner_texts() == ["completed 4", "failed 1"]
    page.click(".state-chip.failed")
    assert page.input_value("#query") == "recipe:fit@1"
    page.fill("#query", "")


def test_columns_are_inputs_that_differ_and_metrics_with_their_best(shared: Tab) -> None:
    heads = shared.page.locator("#runs thead th").all_inner_texts()
    assert heads[5:7] == ["rate", "kind"] and "val_loss min" in heads and "score max" in heads
    assert "err max" in heads, "as the recipe says, whatever the name says"
    best = shared.page.locator("#runs td.best").all_inner_texts()
    assert [each.split()[0] for each in best if each.startswith("0.46")] == ["0.4607"]
    assert not [each for each in column(shared, "err") if "best" in each], (
        "one is not the best of any"
    )
    shared.page.click("#columns")
    shared.page.click(".sheet-menu label:has-text('kind')")
    shared.page.keyboard.press("Escape")
    assert "kind" not in shared.page.locator("#runs thead th").all_inner_texts()
    shared.page.reload()
    shared.until("window.ready")
    assert "kind" not in shared.page.locator("#runs thead th").all_inner_texts(), (
        "it is in the address"
    )


def test_a_view_is_in_the_address_and_kept_by_its_name(browser: Any, where: str) -> None:
    tab = opened(browser, where)
    page = tab.page
    page.fill("#query", "recipe:fit")
    page.click("#runs thead button:has-text('val_loss')")
    losses = [float(each.split()[0]) for each in column(tab, "val_loss")]
    assert losses == sorted(losses) and "sort=m.val_loss" in page.url, "the best is above"
    page.click("tr[data-run]:last-child .star")
    page.reload()
    tab.until("window.ready")
    assert column(tab, "Run")[0].startswith("★") and page.input_value("#query") == "recipe:fit"
    after = column(tab, "val_loss")
    assert after[0] == "9" and any("−" in each for each in after[1:]), (
        "others differ from the baseline"
    )
    page.click("#views")
    page.fill("#view-name", EVIL)
    page.click(".sheet-menu button:has-text('Save')")
    page.keyboard.press("Escape")
    page.goto(page.url.split("#")[0] + "#")
    tab.until("window.ready")
    page.click("#views")
    page.click(".sheet-menu a")
    assert "pin=" in page.url and tab.fits() and tab.said == []
    assert page.evaluate("window.__xss === undefined")


def test_a_sweep_is_one_row_that_opens_into_its_trials(browser: Any, where: str) -> None:
    tab = opened(browser, where)
    tab.page.click("tr:has-text('fit-sweep') button.fold")
    assert "0.2 … 0.8" in tab.page.inner_text("tr:has-text('fit-sweep')"), "what it tries"
    trials = tab.page.locator("tr.trial th").all_inner_texts()
    assert sorted(each.strip() for each in trials) == [
        f"└fit[rate={rate}]" for rate in (0.2, 0.4, 0.8)
    ]
    assert "0.4607" in tab.page.inner_text("tr.trial td.best"), (
        "the best of the recipe and its sweeps"
    )


def test_the_table_is_saved_as_csv_without_formulas(browser: Any, where: str) -> None:
    tab = opened(browser, where)
    with tab.page.expect_download() as download:
        tab.page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text("utf-8"))))
    assert len(rows) == 7 + 3 + 2 and {row["trial"] for row in rows} >= {"", "fit[rate=0.2]"}
    assert {row["name"] for row in rows} == {"", EVIL}
    texts = {
        value
        for row in rows
        for name, value in row.items()
        if not name.endswith((" best", " last"))
    }
    assert not [text for text in texts if text.startswith(tuple("=+-@"))]
    assert {row["kind"] for row in rows} == {"", "adam", "sgd", "<b>lion</b>"}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    browser: Any, where: str, width: int, scheme: str
) -> None:
    tab = opened(browser, where, width, scheme)
    page = tab.page
    page.keyboard.press("/")
    page.keyboard.type("recipe:fit")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("x")
    page.keyboard.press("p")
    assert page.inner_text(".selected b") == "1 selected" and "pin=" in page.url
    page.locator("button.fold").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("tr.trial, .trials li")
    page.locator("#columns").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".sheet-menu")
    assert not (faults := tab.faults()), "\n".join(faults)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#run h1")
    assert tab.fits() and tab.said == [] and page.evaluate("window.__xss === undefined")


def test_runs_are_named_tagged_and_put_away_in_the_page(
    rest: Rest, browser: Any, where: str
) -> None:
    tab = opened(browser, where)
    page = tab.page
    page.click("tr:has-text('pick@1') a.row")
    page.click("#describe")
    page.fill("#about-name", "of <two>")
    page.fill("#about-tags", "#one, two")
    page.fill("#about-note", EVIL)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    tab.until("() => document.getElementById('name').textContent === 'of <two>'")
    assert not (faults := tab.faults()), "\n".join(faults)
    page.click(".back")
    tab.until("() => document.querySelector('#runs')?.textContent.includes('of <two>')")
    page.check("tr:has-text('of <two>') input")
    page.fill("#tag", "three")
    page.click("#add-tag")
    tab.until("() => document.querySelector('#runs').textContent.includes('#three')")
    page.click("#archive-selected")
    tab.until("() => document.getElementById('tallied').textContent.startsWith('6 of 7')")
    (away,) = rest.get("/v1/runs?archived=true")["runs"]
    assert (away["name"], away["tags"], away["note"]) == ("of <two>", ["one", "two", "three"], EVIL)
    page.fill("#query", "is:archived of")
    page.check("tr:has-text('of <two>') input")
    page.click("#archive-selected")
    tab.until("() => !document.querySelector('.selected')")
    assert rest.get("/v1/runs?archived=true")["runs"] == [] and tab.said == []
    cleared = {"name": None, "tags": None, "note": None}
    assert rest.ask("PATCH", f"/v1/runs/{away['id']}", cleared).status_code == 200


def test_hostile_names_do_not_break_out_of_what_is_compared(browser: Any, where: str) -> None:
    tab = opened(browser, where, 390, "dark")
    page = tab.page
    for box in page.locator("[data-run] > input").all():
        box.check()
    page.click("#compare-selected")
    page.wait_for_selector(".multiple canvas")
    page.select_option("#group", "kind")
    page.select_option("#against-metric", "<img src=x onerror=window.__xss=2>")
    page.click("#log-y")
    assert "</script><img src=x" in page.inner_text(".legend") and "<U+202E>" in page.inner_text(
        ".legend"
    )
    assert not (faults := tab.faults()), "\n".join(faults)
    assert page.evaluate("window.__xss === undefined") and tab.fits() and tab.said == []


def test_two_thousand_runs_are_there_at_once_and_found_as_one_types(
    rest: Rest, browser: Any, where: str
) -> None:
    until(lambda: all(run["metrics"] for run in rest.get("/v1/runs?recipe=fit@1")["runs"]))
    many(rest.root / ".recipe" / "recipe.db", 1993)
    tab = Tab(browser, 1280, "light")
    page = tab.page
    page.goto(where)
    page.wait_for_selector("#runs tbody tr")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    tab.until("window.ready")
    whole = page.evaluate("performance.now()")
    assert page.inner_text("#tallied") == "2000 of 2000 runs"
    nodes = page.evaluate("document.querySelectorAll('*').length")
    spent = []
    for typed in (
        "r",
        "ra",
        "rat",
        "rate",
        "rate>",
        "rate>1",
        "rate>1.",
        "rate>1.5",
        "rate>1.5 s",
        "rate>1.5 sg",
    ) * 5:
        spent.append(page.evaluate(TYPE, typed))
    spent.sort()
    figures = {"paint": painted, "all": whole, "nodes": nodes, "filter p95": spent[47]}
    print(json.dumps(figures))
    assert nodes < 2500 and tab.said == []
    # Idle it is 0.2 s, 1.6 s and 90 ms; the suite leaves a sixth of that.
    assert painted < 2500 and whole < 9000 and spent[47] < 600, figures


TYPE = """text => new Promise(done => {
  const field = document.getElementById("query"), begun = performance.now();
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
})"""
