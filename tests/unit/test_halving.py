"""Successive halving: who is behind, and who is not judged yet."""

from __future__ import annotations

import pytest

from runner.planning.halving import Stream, explain_stop, stream


def line(*values: float, every: float = 10) -> Stream:
    return [(every * (n + 1), value) for n, value in enumerate(values)]


@pytest.mark.parametrize(
    ("own", "others", "stops"),
    [
        (line(9, 9), [line(1, 1)], True),  # two are there: the better one goes on
        (line(1, 1), [line(9, 9)], False),
        (line(5, 5), [line(5, 5)], False),  # as good
        (line(9), [line(1, 1)], False),  # its first report: too early to tell
        (line(9, 9), [line(1)], False),  # alone at its rung
        (line(9, 5), [line(9, 1), line(9, 7)], False),  # second of three
        (line(9, 8), [line(9, 1), line(9, 7)], True),
        (
            line(9, 5, 9, 9),
            [line(9, 1, 1), line(9, 6, 6)],
            False,
        ),  # nobody else is at its next rung yet
        (line(), [line(1, 1)], False),
        (line(9, 9, every=20), [line(1, 1, 1, 1)], True),  # rungs are steps, not reports
        (line(9, 9, every=20), [line(1, 1, 1)], False),
    ],
)
def test_an_instance_goes_on_in_the_better_half_of_those_at_its_rung(
    own: Stream, others: list[Stream], stops: bool
) -> None:
    assert bool(explain_stop(own, others, True)) is stops
    assert (
        bool(
            explain_stop(
                [(step, -value) for step, value in own],
                [[(step, -value) for step, value in each] for each in others],
                False,
            )
        )
        is stops
    )


def test_it_is_said_where_and_among_how_many() -> None:
    assert (
        explain_stop(line(9, 9), [line(1, 1)], True)
        == "9 at step 20 is below the better half of 2 instances"
    )


def test_what_is_no_number_and_what_came_before_the_first_step_is_passed_over() -> None:
    points = [
        {"step": 0, "loss": 9.0},
        {"step": 5, "loss": "nan"},
        {"step": 5, "lr": 1},
        {"step": 10, "loss": 2},
    ]
    assert stream(points, "loss") == [(10, 2)]
    assert stream([{"loss": 3.0}, {"loss": 2.0}], "loss") == [(1, 3.0), (2, 2.0)]
