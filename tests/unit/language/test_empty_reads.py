"""Claims about branches and conditions that are the wrong way round: a value that is read where it is empty is said."""

from __future__ import annotations

import pytest

from runner.language import document, empty_reads, parse

RECIPE = """
recipe: x@1
inputs:
  note: {{type: string, required: false}}
  mode: {{type: string, default: fast}}
  to: {{type: string, default: ""}}
steps:
  s:
    when: "{when}"
    run: [echo, "{word}"]
"""


def said(word: str, when: str = "{{ inputs.mode == 'fast' }}") -> list[str]:
    recipe = parse.recipe(document.parse(RECIPE.format(word=word, when=when), "x.yaml"))
    return [each.message for each in empty_reads.warnings(recipe)]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("{{ inputs.note if inputs.note is none else 'n' }}", "inputs.note is null in this branch"),
        ("{{ 'n' if inputs.note is not none else inputs.note }}", "inputs.note is null in this"),
        ("{{ [] if inputs.note != null else ['-n', inputs.note] }}", "inputs.note is null in this"),
        ("{{ inputs.to if inputs.to == '' and inputs.note else 1 }}", 'inputs.to is "" in this'),
        ("{{ inputs.mode if inputs.mode == 'a' else 'b' }}", 'inputs.mode is "a" in this'),
        ("{{ 'b' if not inputs.mode == 'a' else inputs.mode }}", 'inputs.mode is "a" in this'),
    ],
)
def test_a_branch_that_reads_what_its_condition_says_is_empty_is_said(
    word: str, message: str
) -> None:
    assert [text[: len(message)] for text in said(word)] == [message]


@pytest.mark.parametrize(
    "word",
    [
        "{{ 'auto' if inputs.note is none else inputs.note }}",
        "{{ inputs.note if inputs.note else 'n' }}",
        "{{ inputs.note | default('n') }}",
        "{{ 'b' if inputs.mode == 'a' else inputs.mode }}",
        "{{ ['--mode', inputs.mode] if inputs.mode == 'a' else none }}",
        "{{ 'x' if inputs.note is none or inputs.to == '' else inputs.to }}",
        "{{ inputs.note == none }}",
        "{{ inputs.mode",
    ],
)
def test_a_branch_that_reads_what_may_be_there_is_not(word: str) -> None:
    assert said(word) == []


def test_a_step_that_reads_what_its_condition_says_is_empty_is_said() -> None:
    assert said("{{ inputs.to }}", "{{ inputs.to == '' }}") == [
        'inputs.to is "" whenever "s" runs, as its `when` says'
    ]
    assert said("{{ inputs.note }}", "{{ inputs.note is none }}")
    assert said("{{ inputs.to }}", "{{ inputs.to != '' }}") == []
    assert said("{{ inputs.mode }}", "{{ inputs.mode == 'fast' }}") == []
