"""Promise: a reader finds each page, each link and each answer.  `make site` builds the pages; most of this needs no more than the files."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from docs import errors_page, platforms_page, requests_page, voice
from runner.planning.schedule import MOVES
from tests.tools import chromium

HOME = Path(__file__).parents[1]
PAGES = {
    path: path.read_text("utf-8")
    for path in sorted(
        [*HOME.glob("*.md"), *HOME.glob("docs/*.md"), *HOME.glob("examples/**/*.md")]
    )
}
QUESTIONS = {
    "use GPU 1 only": "CUDA_VISIBLE_DEVICES=1",
    "why did step run again": "recipe why",
    "where are my checkpoints": "recipe checkpoints",
    "run on my server": "--driver ssh --host",
    "share results colleague": "recipe push",
    "exit code mean": "errors.md",
    "rent GPU cap cost": "--max-cost",
    "use my own script": "recipe new",
    "resume a killed training": "recipe resume",
    "metrics artifacts python": "runner.results",
    "GPU out of memory": "--where gpu_memory=48",
    "cluster without internet": "--python current",
    "server refuse path": "roots",
    "train on several GPUs": "gpus: 2",
}
"""What a newcomer types into the search, and what the answer has in it."""


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower()).replace(
            " ", "-"
        )
        names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return names


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere, or out of the site."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(text))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"[a-z]+:", link):
            continue
        elsewhere = page.parent == HOME / "docs" and not target.is_relative_to(HOME / "docs")
        if (
            not target.exists()
            or elsewhere
            or (anchor and anchor not in anchors(PAGES.get(target) or target.read_text("utf-8")))
        ):
            wrong.append(link)
    return wrong


def navigation() -> list[str]:
    """The pages that the site's navigation names, in order."""
    found: list[str] = []

    def walk(part: Any) -> None:
        for inner in (
            part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        ):
            walk(inner)
        if isinstance(part, str):
            found.append(part)

    walk(yaml.safe_load((HOME / "mkdocs.yml").read_text("utf-8"))["nav"])
    return found


def test_no_link_is_broken() -> None:
    assert {
        page.relative_to(HOME).as_posix(): wrong
        for page, text in PAGES.items()
        if (wrong := broken(page, text))
    } == {}


def test_a_broken_link_would_be_noticed() -> None:
    page = HOME / "docs" / "state.md"
    text = "[a](none.md) [b](state.md#none) [c](../README.md) [d](state.md#disks) `[e](none.md)`\n```\n[f](none.md)\n```\n[g](https://none.example)"
    assert broken(page, text) == ["none.md", "state.md#none", "../README.md"]


def test_the_navigation_names_every_page_once_and_begins_with_the_tutorial() -> None:
    names = navigation()
    assert names[0] == "tutorial.md" and "tutorial.html" in (
        HOME / "docs" / "index.html"
    ).read_text("utf-8")
    pages = [name for name in names if name.endswith(".md")]
    assert sorted(pages) == sorted(path.name for path in PAGES if path.parent == HOME / "docs")
    for name in set(names) - set(pages):  # a part of a page
        page, _, anchor = name.partition(".html#")
        assert anchor in anchors(PAGES[HOME / "docs" / f"{page}.md"]), name


def test_a_page_opens_with_a_sentence_about_itself() -> None:
    """What the page lets its reader do: neither a heading, nor code, nor a list."""
    pages = {
        path.name: text.split("\n")[:3]
        for path, text in PAGES.items()
        if path.parent == HOME / "docs"
    }
    assert {
        name: lines
        for name, lines in pages.items()
        if not (lines[0].startswith("# ") and not lines[1] and re.match(r"[A-Z`\[]", lines[2]))
    } == {}


def test_the_picture_of_the_states_has_every_move_and_no_other() -> None:
    shown = re.findall(
        r'data-move="(\w+) (\w+)"', (HOME / "docs" / "assets" / "states.svg").read_text("utf-8")
    )
    assert sorted(shown) == sorted(
        (before, after) for before, found in MOVES.items() for after in found
    )


def test_every_fence_is_one_that_the_site_and_github_show_as_code() -> None:
    """The site shows a fence with anything else after its language as running text, and a diagram's source as code."""
    fence = re.compile(r'```(?:(?!mermaid|dot$)[a-z]+(?: title="[^"]+")?)?')
    assert {
        f"{path.name}:{number}": line
        for path, text in PAGES.items()
        for number, line in enumerate(text.splitlines(), 1)
        if line.lstrip().startswith("```") and not fence.fullmatch(line.strip())
    } == {}


class Built(HTMLParser):
    """A built page: its anchors, its links, and its words outside code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.words = ""
        self.diagrams = 0
        self._quoted = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {name for name in (found.get("id"), found.get("name")) if name}
        self.links += [at for at in (found.get("href"), found.get("src")) if at is not None]
        self.diagrams += "mermaid" in (found.get("class") or "").split()
        self._quoted += tag in QUOTED

    def handle_endtag(self, tag: str) -> None:
        self._quoted -= tag in QUOTED

    def handle_data(self, data: str) -> None:
        if not self._quoted:
            self.words += data


QUOTED = frozenset({"code", "pre", "script", "style"})
MARKDOWN = re.compile(
    r"```|`[^`\n]+`|\*\*\w[^*\n]*\*\*|\]\([\w./#-]+\)|^\|[ :-]+\||<!--", re.MULTILINE
)
"""Marks that are words of a page only where its Markdown was not understood."""


def unrendered(page: Built) -> list[str]:
    """Return the marks of Markdown among the words of a built page, and its diagrams, which the site cannot draw offline."""
    return MARKDOWN.findall(page.words) + ["mermaid"] * page.diagrams


def dead(site: Path, path: Path, pages: Mapping[Path, Built]) -> list[str]:
    """Return the links of a built page that name no file or no anchor of the site."""
    wrong = []
    for link in pages[path].links:
        if re.match(r"[a-z]+:|//", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name.partition("?")[0]).resolve() if name else path
        if name in (".", "./"):
            target = path.parent / "index.html"
        if (
            not target.is_relative_to(site)
            or not target.exists()
            or (anchor and target in pages and anchor not in pages[target].anchors)
        ):
            wrong.append(link)
    return wrong


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it, from a copy in which `make clients` was run before."""
    home = tmp_path_factory.mktemp("site")
    shutil.copytree(HOME / "docs", home / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("mkdocs.yml", "Makefile"):
        shutil.copy(HOME / name, home)
    (home / ".cache/clients/prime").mkdir(parents=True)
    (home / ".cache/clients/prime/.ready").touch()
    built = subprocess.run(
        ["make", "site", f"BIN={Path(sys.executable).parent}", "--old-file=.venv/.ready"],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return home / "site"


@pytest.mark.slow
def test_the_site_leaves_the_clients_of_the_tests_alone(site: Path) -> None:
    assert (site.parent / ".cache/clients/prime/.ready").exists()


@pytest.mark.slow
def test_the_built_pages_show_code_as_code_and_have_no_dead_link(site: Path) -> None:
    pages = {path: Built(path.read_text("utf-8")) for path in site.glob("*.html")}
    assert len(pages) > 30
    wrong = {
        path.name: found
        for path, page in pages.items()
        if (found := unrendered(page) + dead(site, path, pages)) and path.name != "404.html"
    }
    assert wrong == {}
    files = re.findall(r'<span class="filename">([^<]+)', (site / "tutorial.html").read_text())
    assert files[0] == "train.py" and "curve.yaml" in files, "a fence shows its file's name"


def test_a_fence_shown_as_text_and_a_dead_link_would_be_noticed(tmp_path: Path) -> None:
    """Each mark as zensical leaves it when it does not understand a page."""
    path = tmp_path / "page.html"
    for text in (
        "<p>```python train.py</p>",
        "<p>see **this**</p>",
        '<div class="mermaid">a</div>',
    ):
        assert len(unrendered(Built(text))) == 1, text
    assert unrendered(Built("<pre>```</pre><p>`a` is <code>`b`</code></p>")) == ["`a`"]
    page = Built('<h2 id="here"></h2><a href="#here"><a href="#gone"><a href="none.html">')
    path.touch()
    assert dead(tmp_path, path, {path: page}) == ["#gone", "none.html"]


def test_the_server_page_has_the_outcome_of_each_request_that_the_contract_suite_holds() -> None:
    text = (HOME / "docs/server.md").read_text("utf-8")
    assert requests_page.refreshed(text) == text, "run python -m docs.generate"


def test_the_server_page_has_the_names_of_hugging_face_for_the_recipes_of_the_library() -> None:
    text = (HOME / "docs/server.md").read_text("utf-8")
    assert platforms_page.refreshed(text) == text, "run python -m docs.generate"


def test_the_errors_page_quotes_messages_of_the_code_and_is_generated_from_its_fixtures() -> None:
    text = PAGES[HOME / "docs" / "errors.md"]
    assert errors_page.refreshed(text) == text, "run python -m docs.generate"
    trees = [
        ast.parse(path.read_text("utf-8"))
        for part in ("runner", "drivers")
        for path in (HOME / part).rglob("*.py")
    ]
    written = "\0".join(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = [
        quote
        for cell in re.findall(
            r"^\| (`[^|]*) \|",
            re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL),
            re.MULTILINE,
        )
        for quote in re.findall("`([^`]+)`", cell)
    ]
    assert (
        len(quoted) > 25
        and [
            quote
            for quote in quoted
            for part in quote.split("…")
            if part.strip(' "') not in written
        ]
        == []
    )


def test_a_page_that_a_message_names_is_there() -> None:
    sources = [
        path
        for part in ("runner", "drivers", "recipes", "schemas")
        for path in (HOME / part).rglob("*.*")
        if path.suffix in (".py", ".yaml", ".json")
    ]
    named = {
        name
        for path in sources
        for name in re.findall(r"\bdocs/([\w-]+\.md)\b", path.read_text("utf-8"))
    }
    assert (
        len(named) > 10
        and sorted(name for name in named if not (HOME / "docs" / name).is_file()) == []
    )


def test_a_text_that_avoids_names_is_measured_and_its_lines_are_shown() -> None:
    avoiding = "Of those that a run left, what is stale goes away: it is listed.\n\nWhere none is free, it waits."
    naming = "Stale outputs are deleted and listed. If no slot is free, the step waits."
    found = voice.measure(avoiding).found
    assert found == {"pronouns": 6, "what": 1, "colons": 1, "marks": 4}
    assert set(voice.measure(naming).found.values()) == {0}
    assert [len(voice.find_marks(each)) for each in voice.sentences(avoiding)] == [3, 1]
    assert voice.find_marks("What makes a step run again?") == []


def test_code_tables_and_headings_of_a_page_are_no_prose() -> None:
    page = "# What it does\n\nRun `it; that`:\n\n```console\n$ what\n```\n\n| those | it |\n|---|---|\n\n[The plan](what.md)."
    assert voice.prose(page).split() == ["Run", "`:", "The", "plan."]


def test_a_page_may_get_better_but_not_worse() -> None:
    now = voice.measure("It is what they say that it is. " * 20)
    assert voice.worse(now, {rate.name: now.rate(rate) for rate in voice.RATES}) == []
    wrong = voice.worse(now, {"pronouns": 80.0, "marks": 1000.0})
    assert [text.split()[0] for text in wrong] == ["pronouns", "what"], wrong
    assert "accepted 80.0 (aim 60)" in wrong[0]


def test_no_page_message_or_docstring_speaks_worse_than_accepted() -> None:
    assert voice.main([]) == 0


@pytest.mark.parametrize(("question", "answer"), QUESTIONS.items())
def test_a_newcomers_question_is_a_heading_with_its_answer_below_it(
    question: str, answer: str
) -> None:
    parts = [
        part for text in PAGES.values() for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE)
    ]
    found = [
        part
        for part in parts
        if set(question.lower().split()) <= set(re.findall(r"\w+", part.partition("\n")[0].lower()))
    ]
    assert len(found) == 1 and answer in found[0]


@pytest.mark.proof
def test_the_site_opens_from_disk_and_its_search_finds_the_answers(site: Path) -> None:
    """Built with the pinned generator, in a copy; Chromium opens it with no network."""
    with chromium() as browser:
        page = browser.new_page()
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.wait_for_url("**/tutorial.html")
        for question, name in [
            *((question, "faq") for question in QUESTIONS),
            ("timed out while logging in", "errors"),
        ]:
            page.click(".md-search__button")
            page.fill("dialog[open] input", question)
            page.wait_for_selector(
                f"dialog li:first-child a[href*='/{name}.html?']"
            )  # the first that is found
            page.reload()
        page.goto((site / "design.html").as_uri())
        assert page.eval_on_selector("img[src$='states.svg']", "image => image.naturalWidth") > 0
        assert said == [] and [url for url in asked if not url.startswith("file:")] == []
