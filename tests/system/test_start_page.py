"""A run that is started in a browser: found among recipes, typed with problems at their fields, planned, swept, started like another."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from runner.interface.cli.main import main
from tests.servers.browser import Tab
from tests.servers.rest import Rest
from tests.support import RECIPE

EVIL = "<img src=x onerror=window.__xss=1>\u202e"
LEARN = f"""\
recipe: learn@1
summary: "Learn words {EVIL}"
doc: |
  {EVIL} More about it.
inputs:
  text: {{type: file, doc: What to learn from.}}
  rate: {{type: number, default: 0.5, exclusiveMinimum: 0, maximum: 1, doc: "How fast. {EVIL}"}}
  word: {{type: string, default: "{EVIL}"}}
  kind: {{type: choice, choices: [calm, "{EVIL}"], default: calm}}
  loud: {{type: boolean, default: false}}
  sizes: {{type: list, items: integer, default: [1, 2]}}
  more: {{type: object, default: {{}}}}
  a1: {{type: integer, default: 1, minimum: 0}}
  a2: {{type: integer, default: 2}}
presets: {{fast: {{rate: 0.75}}, slow: {{rate: 0.25}}}}
steps:
  read: {{run: 'cat {{{{ inputs.text }}}} > {{{{ outputs.o }}}}', outputs: {{o: read.txt}}}}
  learn:
    run: echo {{{{ inputs.rate }}}} {{{{ inputs.word }}}} {{{{ inputs.kind }}}} {{{{ inputs.loud }}}} {{{{ inputs.sizes | tojson }}}} {{{{ inputs.more | tojson }}}} {{{{ inputs.a1 }}}} {{{{ inputs.a2 }}}} {{{{ steps.read.o }}}} > {{{{ outputs.o }}}}
    outputs: {{o: learnt.txt}}
"""
REPORT = """\
recipe: report@1
summary: Report a loss.
inputs:
  rate: {type: number, default: 0.5, exclusiveMinimum: 0, maximum: 1}
  kind: {type: choice, choices: [calm, loud], default: calm}
steps:
  learn: {run: 'echo loss={{ inputs.rate }} {{ inputs.kind }}', metrics: {pattern: 'loss=(?P<loss>[0-9.]+)'}}
"""
RENT = """\
recipe: rent@1
summary: Needs a machine.
inputs: {n: {type: integer, default: 1}}
steps: {learn: {run: "echo {{ inputs.n }}", resources: {gpus: 1}}}
"""


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    root = tmp_path_factory.mktemp("start") / "space"
    (root / "data").mkdir(parents=True)
    (root / "data" / "words.txt").write_text("words\n")
    (root.parent / "far off.txt").write_text("far\n")
    (root / "learn.yaml").write_text(LEARN)
    (root / "rent.yaml").write_text(RENT)
    (root / "report.yaml").write_text(REPORT)
    (root / "recipe.toml").write_text(
        '[recipes]\nallow = ["./learn.yaml", "./rent.yaml", "./report.yaml"]\n[data]\nroots = ["data"]\n'
        '[drivers.loopback]\nprice = 1.2\ngpus = 1\nroot = "cloud"\n'
    )
    far = root.parent / "far off.txt"
    assert main(["run", "-C", str(root), "./learn.yaml", f"text={far}", "rate=0.125"]) == 0
    with Rest(root, "--with-worker") as server:
        yield server


def opened(browser: Any, where: str, at: str, width: int = 1280, scheme: str = "light") -> Tab:
    tab = Tab(browser, width, scheme)
    tab.page.goto(where)
    tab.until("window.ready")
    tab.page.goto(f"{where.split('#')[0]}#{at}")
    return tab


def quiet(tab: Tab) -> bool:
    """Whether the console has nothing but the refusals of plans, which the browser itself notes."""
    return [said for said in tab.said if not said.endswith("/v1/plan") or "422" not in said] == []


def test_recipes_used_here_come_first_and_are_found_by_words(browser: Any, where: str) -> None:
    tab = opened(browser, where, "new=list")
    page = tab.page
    page.wait_for_selector(".card")
    assert page.locator("#offered h2").all_inner_texts() == [
        "Used here",
        "In this folder",
        "Library",
    ]
    assert page.locator(".card b").all_inner_texts()[:2] == ["learn@1", "rent@1"]
    page.fill("#find-recipe", "flux")
    assert "flux-lora@1" in page.locator(".card b").all_inner_texts()
    assert "learn@1" not in page.locator(".card b").all_inner_texts() and quiet(tab)


def test_problems_stand_at_their_fields_while_one_types(browser: Any, where: str) -> None:
    tab = opened(browser, where, "new=learn%401")
    page = tab.page
    assert page.wait_for_selector("#needed").inner_text() == "Missing inputs: text"
    assert page.locator("[data-wrong]").count() == 0, "nothing was typed yet"
    page.fill("#input-rate", "2")
    assert "1" in page.wait_for_selector("[data-wrong=rate]").inner_text()
    assert page.get_attribute("#input-rate", "aria-invalid") == "true"
    page.fill("#input-text", "/etc/passwd")
    page.fill("#input-rate", "1")
    assert "outside the directories" in page.wait_for_selector("[data-wrong=text]").inner_text()
    assert page.locator("[data-wrong=rate]").count() == 0
    page.fill("#input-text", "data/words.txt")
    page.wait_for_selector("#tallied-steps:has-text('2 of 2 steps would run')")
    assert "more than 0, at most 1" in page.inner_text("#about-rate")
    page.reload()
    page.wait_for_selector("#tallied-steps")
    assert page.input_value("#input-text") == "data/words.txt", "a reload keeps what was typed"
    assert page.input_value("#input-rate") == "1" and quiet(tab)
    page.click("text=fast")
    assert page.input_value("#input-rate") == "1", "what was typed is more than a preset"
    page.click("[aria-label^='reset rate to']")
    assert page.input_value("#input-rate") == "0.75"


def test_many_inputs_are_found_by_words_and_open_where_one_is_wrong(
    browser: Any, where: str
) -> None:
    tab = opened(browser, where, "new=sft%401")
    page = tab.page
    page.wait_for_selector("#needed:has-text('dataset, base')")
    assert page.locator(".field:visible [data-name]").count() == 2
    page.fill("#find-input", "rank")
    page.fill("#input-rank", "0")
    page.fill("#find-input", "")
    page.wait_for_selector("[data-wrong=rank]:visible")
    page.fill("#input-rank", "8")
    page.click("text=7b-24gb")
    page.fill("#input-dataset", "hf://datasets/owner/name")
    page.wait_for_selector("#planned .fit .chip")
    assert quiet(tab)


def test_a_sweep_is_built_counted_and_the_same_by_its_command(
    rest: Rest, browser: Any, where: str
) -> None:
    tab = opened(browser, where, "new=learn%401")
    page = tab.page
    page.fill("#input-text", "data/words.txt")
    page.click("[data-several=rate]")
    page.fill("#input-rate", "0.1, 0.2\n0.3")
    page.click("[data-several=kind]")
    page.click(".ticks label >> nth=1")
    assert "3 of rate × 2 of kind = 6 combinations" in page.inner_text("#count")
    page.wait_for_selector("#go:has-text('Start 6 combinations')")
    page.wait_for_selector("#tallied-steps:has-text('6 combinations.')")
    command = page.inner_text("#command")
    page.click("#go")
    page.wait_for_selector("#run h1")
    run = rest.get("/v1/runs?limit=1")["runs"][0]
    done = rest.until(run["id"], "COMPLETED")
    assert done["sweep"]["axes"] == {"rate": [0.1, 0.2, 0.3], "kind": ["calm", EVIL]}
    typed = subprocess.run(
        [
            "sh",
            "-c",
            command.replace("<U+202E>", "\u202e").replace("recipe ", f"{' '.join(RECIPE)} ", 1),
        ],
        cwd=rest.root,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (typed.returncode, typed.stderr) == (0, "everything is fresh (12 steps)\n")


def test_a_range_makes_a_search_whose_command_is_to_copy(
    rest: Rest, browser: Any, where: str
) -> None:
    tab = opened(browser, where, "new=report%401")
    page = tab.page
    page.click("[data-several=rate]")
    page.fill("#input-rate", "0.9..0.1")
    page.wait_for_selector("#needed:has-text('metric of the search')")
    page.fill("#search-metric", "loss")
    assert "is not below" in page.wait_for_selector("[data-wrong=rate]").inner_text()
    page.fill("#input-rate", "0.01..1:log")
    page.fill("#search-trials", "12")
    page.click("[data-several=kind]")
    page.check(".ticks label >> nth=1")
    page.wait_for_selector("#tallied-steps:has-text('12 trials. For each, 1 of 1 steps')")
    command = page.inner_text("#command")
    assert command == (
        "recipe sweep ./report.yaml rate=0.01..1:log kind=calm,loud --tpe=12 --min=loss"
    )
    assert page.locator("#go").count() == 0 and "terminal" in page.inner_text("#in-terminal")
    assert not (faults := tab.faults()), "\n".join(faults)
    checked = [*RECIPE, *shlex.split(command)[1:], "--dry-run"]
    done = subprocess.run(checked, cwd=rest.root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("trial ")) == (0, 4), done.stderr
    page.fill("#input-rate", "0.1, 0.2")
    page.wait_for_selector("#go:has-text('Start 4 combinations')")
    assert quiet(tab)


def test_a_run_is_started_again_with_changes_and_keeps_its_path(
    rest: Rest, browser: Any, where: str
) -> None:
    first = rest.get("/v1/runs?recipe=learn@1")["runs"][-1]
    tab = opened(browser, where, f"new&like={first['id']}")
    page = tab.page
    page.wait_for_selector("#tallied-steps:has-text('Everything is up to date')")
    assert page.input_value("#input-text") == "…/far off.txt"
    page.fill("#input-rate", "0.875")
    assert page.locator(".was").all_inner_texts() == ["was 0.125↺"]
    page.wait_for_selector("#tallied-steps:has-text('1 of 2 steps would run')")
    page.click("#go")
    page.wait_for_selector("#run h1")
    again = rest.get("/v1/runs?recipe=learn@1&limit=1")["runs"][0]
    assert again["inputs"] == first["inputs"] | {"rate": 0.875}
    assert rest.until(again["id"], "COMPLETED") and quiet(tab)


def test_a_form_that_is_sent_twice_is_one_run(rest: Rest, browser: Any, where: str) -> None:
    tab = opened(browser, where, "new=learn%401")
    page = tab.page
    page.fill("#input-text", "data/words.txt")
    page.fill("#input-rate", "0.0625")
    page.wait_for_selector("#tallied-steps")
    page.evaluate("document.getElementById('form').requestSubmit()")
    page.evaluate("document.getElementById('form')?.requestSubmit()")
    page.wait_for_selector("#run h1")
    same = [run for run in rest.get("/v1/runs")["runs"] if run["inputs"].get("rate") == 0.0625]
    assert len(same) == 1


def test_offers_are_compared_and_one_is_taken(browser: Any, where: str) -> None:
    tab = opened(browser, where, "new=rent%401")
    page = tab.page
    page.wait_for_selector("#ask-offers:enabled")
    assert page.locator("#driver option").all_inner_texts()[:2] == [
        "local",
        "loopback (in settings)",
    ]
    assert page.locator("#driver optgroup option").count() > 0, "what has no key cannot be chosen"
    page.click("#ask-offers")
    page.click("[aria-label^='use loopback']")
    assert page.input_value("#driver") == "loopback"
    page.wait_for_selector(".fit:has-text('$1.20 an hour')")
    page.click("#offers summary")
    assert "runpod" in page.inner_text("#offers details")
    page.fill("#cost", "2.5")
    page.wait_for_selector("#command:has-text('--max-cost=2.5')")
    page.fill("#cost", "much")
    assert "limits.cost" in page.wait_for_selector("#planned .worse").inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_stands_in_the_way_of_keys_and_screen_readers(
    browser: Any, where: str, width: int, scheme: str
) -> None:
    tab = opened(browser, where, "", width, scheme)
    page = tab.page
    page.focus("#new")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card")
    assert not (faults := tab.faults()), "\n".join(faults)
    page.locator(".card:has-text('learn@1')").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#needed")
    page.focus("#input-text")
    page.keyboard.type("data/words.txt")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    page.focus("[data-several=kind]")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector("#count")
    page.focus("#input-a1")
    page.keyboard.type("x")
    page.wait_for_selector("[data-wrong=a1]")
    for each in page.locator("summary").all():
        each.click()
    assert not (faults := tab.faults()), "\n".join(faults)
    assert tab.fits() and quiet(tab) and page.evaluate("window.__xss === undefined")
    assert all(url.startswith(where.split("/#")[0]) for url in tab.asked)
