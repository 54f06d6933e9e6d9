"""What came out of a run, in a browser: samples with one slider, previews, checkpoints, environment, a link to share; hostile files stay files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from runner.server.page import PARTS
from tests.servers.browser import Tab
from tests.servers.outputs_space import EVIL, run_ids, served
from tests.servers.rest import Rest


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with served(tmp_path_factory.mktemp("outputs")) as server:
        yield server


@pytest.fixture(scope="module")
def runs(rest: Rest) -> dict[str, str]:
    return run_ids(rest)


def opened(browser: Any, where: str, view: str, width: int = 1280, scheme: str = "light") -> Tab:
    tab = Tab(browser, width, scheme)
    tab.page.goto(f"{where}&{view}")
    tab.page.wait_for_selector("main section h2")
    return tab


DRAWN = (
    "() => [...document.querySelectorAll('#samples img')].filter(each => each.naturalWidth).length"
)


def test_one_slider_moves_all_samples(browser: Any, where: str, runs: dict[str, str]) -> None:
    tab = opened(browser, where, f"run={runs['red']}&tab=samples")
    page = tab.page
    tab.until(f"({DRAWN})() === 4")
    assert page.inner_text("#at-step") == "60"
    first = page.get_attribute("#samples img", "src")
    page.focus("#at")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#samples pre >> text=At step 20 the cat says miau")
    for key in ("Home", "End", "Home", "End", "ArrowLeft", "ArrowLeft") * 2:
        page.keyboard.press(key)
    tab.until(f"({DRAWN})() === 4")
    assert "at=20" in page.url and page.locator("#samples .quiet >> text=abort").count() == 0
    assert page.get_attribute("#at", "aria-valuetext") == "step 20"
    tab.until("src => document.querySelector('#samples img').src !== src", first)
    assert page.locator("#samples audio[src^='blob:']").count() == 1
    page.reload()
    page.wait_for_selector("#samples pre >> text=At step 20")
    assert page.inner_text("#at-step") == "20"
    page.keyboard.press("Tab")
    page.focus(".shot >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog.enlarged img")
    assert "at step 20" in str(page.get_attribute("dialog.enlarged img", "alt"))
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    assert page.evaluate("document.activeElement.className") == "shot"
    widths = [url for url in tab.asked if "width=" in url]
    assert widths and all("width=384" in url or "width=1600" in url for url in widths), (
        "pictures come as the server draws them"
    )
    assert tab.said == []


def test_samples_of_two_runs_stand_side_by_side(
    browser: Any, where: str, runs: dict[str, str]
) -> None:
    ids = [runs[name] for name in ("red", "paint@1", "out of paint")]
    tab = opened(browser, where, f"compare={quote(' '.join(ids))}")
    page = tab.page
    page.wait_for_selector("#samples pre >> nth=1")
    page.wait_for_selector("figure.picture >> nth=0 >> img >> nth=1")
    page.focus("#at")
    page.keyboard.press("Home")
    page.wait_for_selector("#samples pre >> text=At step 0 >> nth=1")
    page.select_option("#right", label="out of paint")
    page.wait_for_selector("#samples >> text=Not created by this run >> nth=0")
    assert tab.said == []


def test_outputs_open_into_what_the_server_shows_of_them(
    browser: Any, where: str, runs: dict[str, str]
) -> None:
    tab = opened(browser, where, f"run={runs['red']}&tab=outputs")
    page = tab.page
    page.focus(".outputs button >> text=train.adapter")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-kind=tensors] >> text=layer.7.weight")
    assert "16,384 of F32" in page.inner_text(".facts-of")
    page.click("text=train.made/")
    page.wait_for_selector(".folder li >> nth=10")
    page.fill("[aria-label='files of train.made']", "rows")
    page.click(".folder button >> text=rows.csv")
    page.wait_for_selector("[data-kind=table] >> text=a cat 7")
    page.reload()
    page.wait_for_selector("[data-kind=table] >> text=a cat 7")
    for name, shown in (("rows.jsonl", "word word"), ("config.json", '"layers": [')):
        page.fill("[aria-label='files of train.made']", name)
        page.click(f".folder button >> text={name}")
        page.wait_for_selector(f".preview >> text={shown}")
    page.click("text=plot.plot")
    tab.until("() => document.querySelector('.preview img')?.naturalWidth > 0")
    with page.expect_download() as download:
        page.click("[aria-label='save plot.plot']")
    assert download.value.suggested_filename == "plot.plot"
    assert tab.said == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_hostile_files_stay_files(
    browser: Any, where: str, runs: dict[str, str], width: int, scheme: str
) -> None:
    tab = opened(
        browser, where, f"run={runs['hostile@1']}&tab=outputs&output=make.out", width, scheme
    )
    page = tab.page
    page.wait_for_selector(".folder li")
    for n in range(page.locator(".folder li").count()):
        page.click(f".folder li >> nth={n} >> button.plain")
        page.wait_for_selector(
            f".folder li >> nth={n} >> .preview[data-kind]"
        )  # the last: step-1.png
    assert page.evaluate("window.__xss === undefined") and tab.fits()
    assert not (faults := tab.faults()), "\n".join(faults)
    page.wait_for_selector(".preview >> text=An SVG drawing may contain scripts")
    assert page.locator(".preview img").count() == 0 and tab.said == []
    page.click("#tab-samples")
    page.wait_for_selector("#samples >> text=more than 40 million pixels")
    page.click("#tab-details")
    page.wait_for_selector("#given")
    assert EVIL[:20] in page.inner_text("#given") and "<U+202E>" in page.inner_text("#given")
    page.click("#diff summary")
    page.wait_for_selector(".diff .added >> text=brighter than <img")
    assert page.evaluate("window.__xss === undefined") and tab.fits()
    assert all("422" in text for text in tab.said), "a browser logs each refusal itself"


def test_a_run_goes_on_from_the_checkpoint_that_is_chosen(
    browser: Any, where: str, rest: Rest, runs: dict[str, str]
) -> None:
    tab = opened(browser, where, f"run={runs['out of paint']}&tab=outputs")
    page = tab.page
    best = page.wait_for_selector("#checkpoints tr[data-number='40']")
    assert "best" in best.inner_text()
    page.focus("tr[data-number='40'] button")
    page.keyboard.press("Enter")
    page.click("tr[data-number='40'] >> text=Set newer checkpoints aside")
    page.wait_for_selector("#chip >> text=queued")
    again = page.url.partition("run=")[2]
    assert again != runs["out of paint"]
    found = rest.get(f"/v1/runs/{again}/checkpoints")["checkpoints"]
    assert [each["number"] for each in found if each["newest"]] == [40]
    rest.ask("POST", f"/v1/runs/{again}/cancel", {})
    assert tab.said == []


def test_details_tell_inputs_commit_diff_and_packages(
    browser: Any, where: str, runs: dict[str, str]
) -> None:
    tab = opened(browser, where, f"run={runs['red']}&tab=details")
    page = tab.page
    page.wait_for_selector("#environment")
    assert page.inner_text("[data-input=hue] b") == "3"
    assert page.locator("[data-input=count] b").count() == 0
    page.check("#only-other")
    assert page.locator("#given tbody tr").count() == 1
    assert len(page.inner_text("#commit")) == 40
    page.click("#diff summary")
    assert "+# brighter than" in page.inner_text(".diff .added")
    page.click(".packages summary")
    page.fill("[aria-label='packages that are shown']", "pytest==")
    assert page.inner_text(".package-list").startswith("pytest==")
    assert tab.said == []


def test_a_link_to_share_opens_one_run_to_read_until_it_is_ended(
    browser: Any, where: str, rest: Rest, runs: dict[str, str]
) -> None:
    tab = opened(browser, where, f"run={runs['red']}")
    page = tab.page
    page.click("#share")
    page.wait_for_selector("dialog.sharing")
    assert not (faults := tab.faults()), "\n".join(faults)
    page.select_option("#share-days", "1")
    page.click("#share-make")
    link = page.wait_for_selector("#share-link").input_value()
    assert link.startswith(f"{rest.url}/#token=rcp_") and link.endswith(f"&run={runs['red']}")

    reader = Tab(browser, 390, "dark")
    reader.page.goto(link)
    reader.page.wait_for_selector("#name >> text=red")
    assert "rcp_" not in reader.page.url
    for name in ("samples", "outputs", "details", "log", "curves"):
        reader.page.click(f"#tab-{name}")
        reader.page.wait_for_selector(f"#tab-{name}[aria-current=page]")
    hidden = "[data-verb], #describe, #archive, #share, #new, #like, .back, nav[aria-label=views]"
    assert reader.page.locator(hidden).count() == 0
    assert not (faults := reader.faults()), "\n".join(faults)
    for other in ("", f"#run={runs['paint@1']}"):
        reader.page.goto(f"{rest.url}/{other}")
        reader.page.wait_for_selector("#name >> text=red")
    asked = [urlsplit(url) for url in reader.asked if not url.startswith("blob:")]
    assert {f"{each.scheme}://{each.netloc}" for each in asked} == {rest.url}
    assert all(each.path.startswith("/v1/") or each.path in PARTS for each in asked)
    assert not any("rcp_" in each.path + each.query for each in asked)

    page.click(".links button")
    page.wait_for_selector(".links", state="detached")
    reader.page.reload()
    reader.page.wait_for_selector("#sign")
    assert tab.said == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    browser: Any, where: str, runs: dict[str, str], width: int, scheme: str
) -> None:
    red = f"run={runs['red']}"
    views = {
        f"{red}&tab=samples": "#samples img",
        f"{red}&tab=outputs&output=train.made&path=rows.csv": "[data-kind=table]",
        f"{red}&tab=details": "#environment",
        f"run={runs['out of paint']}&tab=outputs": "#checkpoints",
        f"compare={runs['red']}%20{runs['paint@1']}": "#samples pre",
    }
    for view, shown in views.items():
        tab = opened(browser, where, view, width, scheme)
        tab.page.wait_for_selector(shown)
        assert not (faults := tab.faults()), "\n".join([view, *faults])
        assert tab.fits() and tab.said == [], view
        tab.context.close()
