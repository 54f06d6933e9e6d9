"""What a step reports is read line by line, and nothing that it writes stops the reading."""

from __future__ import annotations

import pytest

from runner.execution.metrics import last, parse


def test_the_last_value_of_every_name_counts_and_nested_names_join() -> None:
    assert last([b'{"loss": 2, "eval": {"loss": 3.5}}\n', b'{"loss": 1}\n', b'{"loss": 0, "st']) == {"loss": 1, "eval.loss": 3.5}


@pytest.mark.parametrize("depth", [500, 900, 2000, 100_000])
def test_a_deeply_nested_line_is_passed_over_or_read_and_never_an_error(depth: int) -> None:
    found = parse(b'{"a":' * depth + b"1" + b"}" * depth)
    assert found in ({}, {".".join("a" * depth): 1})
    assert parse(b"[" * depth) == {}
    assert last([b'{"a":' * depth + b"1" + b"}" * depth, b'{"loss": 1}'])["loss"] == 1
