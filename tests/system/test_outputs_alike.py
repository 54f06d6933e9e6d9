"""This machine and a host with a disk of its own judge outputs and inputs by the same rules, in the same words."""

from __future__ import annotations

import pytest

from runner.execution.terms import Settings
from tests.support import Space

PLACES = ["local", "loopback"]


def reason(space: Space, place: str) -> str:
    """Why the only step failed; empty if it did not."""
    space.attempt(settings=Settings(driver=place))
    assert space.summary is not None
    if not space.summary.failed:
        return ""
    return space.summary.failed[0].reason.removesuffix(" (exit 0)")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("run", "output", "words"),
    [
        ("true", "o", "declared output o was not created"),
        ("true", "{path: o, optional: true}", ""),
        ("mkfifo o", "o", "declared output o is neither a file nor a directory"),
        (
            "mkfifo o",
            "{path: o, optional: true}",
            "declared output o is neither a file nor a directory",
        ),
        ("ln -s nowhere o", "o", "declared output o is a broken symbolic link"),
        (
            "ln -s nowhere o",
            "{path: o, nonempty: true}",
            "declared output o is a broken symbolic link",
        ),
        ("ln -s o o", "o", "declared output o is a broken symbolic link"),
        (
            "rmdir o; ln -s /etc o",
            "o/passwd",
            "declared output o/passwd is behind a link that points outside the attempt directory",
        ),
        ("mkdir real; echo 1 > real/x; rmdir o; ln -s real o", "o/x", ""),
        ("rmdir o; echo 1 > o", "o/", "declared output o is not a directory"),
        (
            "touch o",
            "{path: o, nonempty: true}",
            "declared output o is empty, but the recipe requires content",
        ),
        (
            "true",
            "{path: o/, nonempty: true}",
            "declared output o is empty, but the recipe requires content",
        ),
        (
            "touch real; ln -s real o",
            "{path: o, nonempty: true}",
            "declared output o is empty, but the recipe requires content",
        ),
        ("mkdir o/inner", "{path: o/, nonempty: true}", ""),
        ("truncate -s 1M o", "{path: o, nonempty: true}", ""),
    ],
)
def test_an_output_is_judged_alike(
    space: Space, place: str, run: str, output: str, words: str
) -> None:
    space.recipe(f"steps:\n  s: {{run: '{run}', outputs: {{o: {output}}}}}\n")
    assert reason(space, place) == words


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "change",
    [
        "chmod u+w in.txt; echo two > in.txt",
        "touch -r in.txt ref; chmod u+w in.txt; echo more >> in.txt; touch -r ref in.txt",
        "echo two > other; touch -d 2001-01-01 other; mv -f other in.txt",
        "touch -r in.txt other; cp -p --remove-destination other in.txt",
        "rm -f in.txt",
    ],
)
def test_a_changed_copy_fails_the_step_alike(space: Space, place: str, change: str) -> None:
    space.write("in.txt", "one\n")
    space.recipe(
        f"steps:\n  s: {{run: '{change}; echo 1 > o', deps: [in.txt], outputs: {{o: o}}}}\n"
    )
    assert reason(space, place) == "the step changed its input in.txt; inputs are read-only"


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_that_is_only_read_or_made_writable_is_not_changed(space: Space, place: str) -> None:
    space.write("in.txt", "one\n")
    space.recipe(
        "steps:\n  s: {run: 'chmod u+w in.txt; ln in.txt again; cat again > o', deps: [in.txt], outputs: {o: o}}\n"
    )
    assert reason(space, place) == ""
    assert space.read("o") == "one\n"
