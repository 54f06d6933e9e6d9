"""A step that puts something else in the place of a file that recipe reads while it runs: nothing waits for it, and it is said."""

from __future__ import annotations

import signal

import pytest

from tests.support import Space, until

PLACES = {
    "$RECIPE_METRICS": "$RECIPE_METRICS",
    "its log": "$(readlink /proc/$$/fd/1)",
    "the record of its machine": "${RECIPE_METRICS%.metrics}.host",
}
KINDS = {
    "a pipe": 'mkfifo "$place"',
    "a folder": 'mkdir -p "$place/inside"',
    "an endless device": 'ln -s /dev/zero "$place"',
    "a link to itself": 'ln -s "$place" "$place"',
}


def recipe_replacing(place: str, kind: str, then: str) -> str:
    return (
        "steps:\n  a:\n    metrics: true\n    outputs: {o: o.txt}\n    run: |\n"
        f'      place="{place}"; rm -f "$place"; {kind}\n'
        '      touch "$PWD.replaced"\n'
        f"      {then}\n"
        '      echo made > "{{ outputs.o }}"\n'
    )


@pytest.mark.parametrize("driver", ["local", "loopback"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_ends_whatever_a_step_puts_there(
    space: Space, place: str, kind: str, driver: str
) -> None:
    space.recipe(recipe_replacing(PLACES[place], KINDS[kind], "sleep 0.3"))
    code, _, err = space.command("run", "./recipe.yaml", "--driver", driver)
    assert code == 0, err
    assert space.read("o.txt") == "made\n"
    # The agent of a host has looked at its machine, and written of it, only when a step ran for some seconds.
    if driver == "local" or "machine" not in place:
        assert f"a: the step replaced {place} by a special file" in err


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_ended_by_one_signal_whatever_a_step_puts_there(space: Space, kind: str) -> None:
    space.recipe(recipe_replacing("$RECIPE_METRICS", KINDS[kind], "exec sleep 300"))
    process = space.start("run", "./recipe.yaml")
    until(lambda: list((space.root / ".recipe/attempts").glob("*.replaced")), seconds=30)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 or process.returncode == 143, err


def test_metrics_through_a_link_to_a_file_of_the_step_are_read(space: Space) -> None:
    space.recipe(
        "steps:\n  a:\n    metrics: true\n    outputs: {o: o.txt}\n    run: |\n"
        '      rm -f "$RECIPE_METRICS"; ln -s "$PWD/own.jsonl" "$RECIPE_METRICS"\n'
        '      echo \'{"step": 1, "loss": 0.5}\' > own.jsonl; cp own.jsonl "{{ outputs.o }}"\n'
    )
    space.run()
    assert '"loss"' in space.command("results", "./recipe.yaml", "--json")[1]
