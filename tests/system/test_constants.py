"""What can never work is refused by `validate`: it needs no attempt to be known.  And what a message says can be read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import Space


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"run": ["echo", "{{ 'x' * 999 }}"]}, "x"),
        ({"run": ["echo", "{{ 1 // 0 }}"]}, "zero"),
        ({"run": "echo {{ 1 // 0 }}"}, "zero"),
        ({"run": ["echo", "a\0b"]}, "a NUL character cannot be in an argument"),
        ({"run": ["echo"], "env": {"A": "a\0b"}}, "a NUL character"),
        ({"run": "echo a\0b"}, "a NUL character cannot be in a script"),
        ({"run": [None, None]}, "the command is empty"),
        ({"run": ["{{ none }}", []]}, "the command is empty"),
    ],
)
def test_a_constant_that_no_attempt_can_use_is_refused(
    space: Space, step: dict[str, Any], words: str
) -> None:
    space.recipe({"steps": {"s": step}})
    code, out, err = space.command("validate")
    assert code == 3 and words in out + err, out + err


@pytest.mark.parametrize(
    "step",
    [
        {"run": ["{{ inputs.x }}", None]},
        {"run": ["echo", "{{ 4 // 2 }}", None, "{{ none }}"]},
        {"run": "echo {{ 4 // 2 }}"},
    ],
)
def test_a_command_that_may_work_is_valid(space: Space, step: dict[str, Any]) -> None:
    space.recipe({"inputs": {"x": {"type": "string", "default": "true"}}, "steps": {"s": step}})
    assert space.command("validate")[0] == 0


def test_paths_that_differ_only_in_case_are_two_files(space: Space) -> None:
    space.recipe(
        {
            "steps": {
                "x": {"run": "true", "outputs": {"o": "X"}},
                "y": {"run": "true", "outputs": {"o": "x"}},
            }
        }
    )
    assert space.command("validate")[0] == 0


def test_memory_that_no_machine_has_is_named_in_plain_numbers(space: Space) -> None:
    space.recipe(
        {"steps": {"s": {"run": "true", "resources": {"memory": "2000TB", "cpus": 100000000}}}}
    )
    code, _, err = space.command("run")
    assert (
        code == 2
        and "s requires 2.0 PB of memory, but this machine has " in err
        and "requires 100,000,000 processors" in err
        and "e+" not in err
    )


def test_a_key_that_a_step_does_not_have_is_not_taken_for_another(space: Space) -> None:
    space.recipe({"steps": {"s": {"run": "true", "doc": "what it does"}}})
    out = space.command("validate")[1]
    assert 'step "s" has no key "doc"' in out and "image" not in out


@pytest.mark.parametrize(
    "text",
    ["retries: " + "9" * 5000, "retries: " + "9" * 5_000_000, "run2: " + "word " * 1_000_000],
)
def test_a_huge_value_is_cut_in_the_message(space: Space, text: str) -> None:
    space.write(
        "recipe.yaml", f"recipe: t@1\nsummary: x\nsteps:\n  s:\n    run: echo\n    {text}\n"
    )
    code, out, err = space.command("validate")
    assert code == 3 and len(out + err) < 1500
