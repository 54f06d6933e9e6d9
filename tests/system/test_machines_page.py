"""What a browser shows of rented machines, workers, the queue and stores: what they cost, why runs wait, and what can be done about it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.interface.cli.main import main
from runner.storage.records.ledger import LeaseRow, Ledger
from tests.servers.browser import Tab
from tests.servers.rest import Rest
from tests.support import RECIPE, until

EVIL = "<img src=x onerror=window.__xss=1>\u202e"
HELLO = """\
recipe: hello@1
steps: {say: {run: 'echo hello > {{ outputs.o }}', outputs: {o: hello.txt}}}
"""
SETTINGS = """\
[recipes]
allow = ["hello.yaml"]
[stores.team]
url = "s3://team/results"
[stores.near]
url = "near"
[stores.far]
url = "far"
[drivers.loopback]
price = 1.2
gpus = 1
root = "cloud"
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("machines") / "space"
    root.mkdir()
    (root / "hello.yaml").write_text(HELLO)
    (root / "recipe.toml").write_text(SETTINGS)
    for name, size in (("recipe-store.json", 1000), ("objects/a", 6000)):
        (root / "near" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "near" / name).write_bytes(b"x" * size)
    assert main(["run", "-C", str(root), "./hello.yaml"]) == 0
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RECIPE_LEDGER", str(root.with_name("ledger.db")))
        with Rest(root) as server:
            worker = subprocess.Popen(
                [*RECIPE, "worker", "-qq", "--label", "gpu=a100", "--driver", "ssh"],
                cwd=root,
                stdin=subprocess.DEVNULL,
            )
            try:
                until(lambda: server.get("/v1/workers")["workers"])
                yield server
            finally:
                worker.terminate()
                worker.wait(60)


def rented(key: str, run: str, workspace: str, gpu: str = "H100") -> None:
    """Note a machine that costs 36 dollars an hour."""
    offer = {"resources": {"gpus": 2, "gpu": gpu}}
    row = LeaseRow(key, "loopback", run, workspace, {}, "me", "ASKED", offer, until=9e9, price=36.0)
    with Ledger.open(Path(os.environ["RECIPE_LEDGER"]).with_name("ledger.db")) as ledger:
        ledger.ask(row)


def opened(
    browser: Any, where: str, width: int = 1280, scheme: str = "light", token: str = ""
) -> Tab:
    tab = Tab(browser, width, scheme)
    page, _, known = where.partition("/#token=")
    tab.page.goto(f"{page}/#token={token or known}&machines")
    tab.page.wait_for_selector("#machines .stores")
    return tab


@pytest.fixture(scope="module")
def waiting(rest: Rest) -> list[str]:
    """Runs that wait, and machines that are rented."""
    rented("k1", "", str(rest.root))
    rented("k2", f"{EVIL}", "/no/such/workspace", EVIL)
    return [rest.submit(user="ann"), rest.submit(labels={"gpu": "b200"})]


def test_why_a_run_waits_is_said_and_its_priority_is_changed(
    rest: Rest, browser: Any, where: str, waiting: list[str]
) -> None:
    tab = opened(browser, where)
    page = tab.page
    first, second = waiting
    assert page.inner_text("#waiting b") == "2" and page.inner_text("#alive") == "1\nworker, 1 idle"
    rows = page.locator("[aria-label=queue] tbody tr")
    assert first in rows.nth(0).inner_text() and "driver" in rows.nth(0).inner_text()
    page.fill(f"[aria-label='priority of {second}']", "5")
    page.keyboard.press("Enter")
    tab.until(
        "id => document.querySelector('[aria-label=queue] tbody tr').textContent.includes(id)",
        second,
    )
    assert rest.get(f"/v1/runs/{second}")["priority"] == 5
    page.fill(f"[aria-label='priority of {second}']", "many")
    page.keyboard.press("Enter")
    assert page.wait_for_selector("#message").inner_text() != ""
    assert "gpu=a100" in page.inner_text("[aria-label=workers]")
    assert "idle" in page.inner_text("[aria-label=workers]")
    page.click(f"[aria-label=queue] a:has-text('{first}')")
    page.wait_for_selector("#run h1")


def test_a_machine_that_nothing_uses_is_ended_after_a_question(
    rest: Rest, browser: Any, where: str, waiting: list[str]
) -> None:
    del waiting
    reader = rest.ask("POST", "/v1/tokens", {"scope": "read"}).json()["token"]
    looking = opened(browser, where, token=reader)
    assert looking.page.locator("#machines button.stop").count() == 0
    assert looking.page.locator("#machines input").count() == 0
    rented("k3", "", str(rest.root))
    tab = opened(browser, where)
    page = tab.page
    page.wait_for_selector("text=k3")
    assert page.inner_text("#an-hour b") == "$108.00"
    page.click("[aria-label='End k3']")
    assert any(each["key"] == "k3" for each in rest.get("/v1/leases")["leases"]), "it was asked"
    page.click("[aria-label='Really end k3']")
    tab.until("() => !document.getElementById('machines').textContent.includes('k3')")
    assert page.inner_text("#an-hour b") == "$72.00" and tab.said == []


def test_what_is_kept_is_shown_by_what_it_is(
    rest: Rest, browser: Any, where: str, waiting: list[str]
) -> None:
    del waiting
    tab = opened(browser, where)
    page = tab.page
    kept = {each["name"]: each for each in rest.get("/v1/stores")["parts"]}
    assert kept["other"]["bytes"] > 0 and all(each["whole"] for each in kept.values())
    page.wait_for_selector("[aria-label='workspace storage']")
    shared = "[aria-label='shared stores']"
    assert "s3://team/results" in page.inner_text(shared)
    page.click("[aria-label='measure near']")
    page.wait_for_selector(f"{shared} >> text=2 files")
    assert rest.get("/v1/stores/near/size") == {"bytes": 7000, "files": 2, "whole": True}
    page.click("[aria-label='measure far']")
    assert "is not a directory" in page.wait_for_selector(f"{shared} .worse").inner_text()
    assert rest.ask("GET", "/v1/stores/none/size").status_code == 404


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    browser: Any, where: str, waiting: list[str], width: int, scheme: str
) -> None:
    del waiting
    tab = opened(browser, where, width, scheme)
    page = tab.page
    page.focus(".mark")
    page.keyboard.press("Enter")
    tab.until("window.ready")
    page.locator(".top nav a >> text=Machines").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='workspace storage']")
    page.reload()
    page.wait_for_selector("[aria-label='workspace storage']")
    page.focus("[aria-label='End k1']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Really end k1']")
    assert not (faults := tab.faults()), "\n".join(faults)
    assert tab.fits() and tab.said == [] and page.evaluate("window.__xss === undefined")
    assert all(url.startswith(where.split("/#")[0]) for url in tab.asked)
    if shots := os.environ.get("RECIPE_SHOTS"):
        page.screenshot(path=f"{shots}/machines-{width}-{scheme}.png", full_page=True)
