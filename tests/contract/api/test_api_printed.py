"""A verb prints the same of a run, whether its workspace is here or behind a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from runner.interface.cli.main import main
from tests.servers.page_space import seeded
from tests.servers.rest import Rest

FIRST, SECOND, TALK = "RUN1", "RUN2", "TALK"
"""In a command line: two runs of one recipe, and one whose steps print."""
PRINTS = """\
recipe: prints@1
summary: Prints.
steps:
  say: {run: 'echo one {{ matrix.n }}; printf open', matrix: {n: [1, 2]}}
  last: {run: echo over, needs: [say]}
"""
VERBS = (
    ["runs"],
    ["runs", "-n", "3", "--json"],
    ["runs", "--failed"],
    ["runs", "--recipe", "fit"],
    ["runs", "--recipe", "fit-sweep@1", "--json"],
    ["runs", "--tag", "none"],
    ["show", FIRST],
    ["show", FIRST, "--json"],
    ["diff", FIRST, SECOND],
    ["diff", FIRST, SECOND, "--json"],
    ["diff", SECOND],
    ["logs", FIRST],
    ["logs", TALK],
    ["logs", "-f", TALK],
    ["logs", f"{TALK}/say"],
    ["logs", f"{TALK}/say[n=2]"],
    ["logs", f"{TALK}/none"],
    ["logs", f"{TALK}/say", "--attempt", "2"],
    ["logs", "20200101-000000-aaaaaa"],
)


class Spaces(NamedTuple):
    """A workspace with runs of many kinds, and its server."""

    root: Path
    rest: Rest
    runs: Mapping[str, str]


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spaces]:
    root = tmp_path_factory.mktemp("printed") / "space"
    seeded(root)
    (root / "prints.yaml").write_text(PRINTS)
    assert main(["run", "-C", str(root), "./prints.yaml"]) == 0
    with Rest(root) as rest, pytest.MonkeyPatch.context() as environ:
        environ.setenv("RECIPE_TOKEN", rest.token)
        fits = rest.get("/v1/runs?recipe=fit@1&state=COMPLETED")["runs"]
        ran = [each["id"] for each in reversed(fits) if each["counts"]["ran"]]
        talk = rest.get("/v1/runs?recipe=prints@1")["runs"][0]["id"]
        yield Spaces(root, rest, {FIRST: ran[0], SECOND: ran[1], TALK: talk})


def printed(
    spaces: Spaces, words: list[str], to: str, capture: pytest.CaptureFixture[bytes]
) -> tuple[int, str]:
    """The exit code of a command line, and what it prints."""
    meant = ["/".join(spaces.runs.get(part, part) for part in word.split("/")) for word in words]
    capture.readouterr()
    code = main(["-C", str(spaces.root), *meant, "--to", to])
    out, err = capture.readouterr()
    # Where it looked is the only word that differs.
    text = (out + err).decode().replace(f" at {spaces.rest.url}", "").replace(" here", "")
    text = text.replace(" in this workspace", "")
    return code, text


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_a_verb_prints_the_same_here_and_at_a_server(
    spaces: Spaces, words: list[str], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    here = printed(spaces, words, "here", capfdbinary)
    assert here[1]
    there = printed(spaces, words, spaces.rest.url, capfdbinary)
    assert there[1].splitlines() == here[1].splitlines() and there[0] == here[0]


def test_status_prints_the_same_runs_here_and_at_a_server(
    spaces: Spaces, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    spaces.rest.submit("fit", inputs={"rate": 0.7}, not_before="2099-01-01T00:00:00Z")
    found = [
        json.loads(printed(spaces, ["status", "--json"], to, capfdbinary)[1])
        for to in ("here", spaces.rest.url)
    ]
    for each in found:
        each.pop("recipes")
    assert found[0] == found[1] and found[0]["queued"]
