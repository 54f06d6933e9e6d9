"""Steps stand in layers, attempts in as few lanes as ran at once, and thinning curves loses no spike."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from runner.interface import drawing
from runner.interface.drawing import TimelineBar
from runner.interface.page import log_lines, visible


def test_a_step_stands_right_of_all_that_it_needs() -> None:
    needs = {"a": [], "b": ["a"], "c": [], "d": ["b", "c"], "e": ["a"]}
    assert drawing.layers(needs) == [["a", "c"], ["b", "e"], ["d"]]
    boxes, width, height = drawing.boxes(needs)
    at = {box.step: box for box in boxes}
    assert all(at[need].x < at[step].x for step, needed in needs.items() for need in needed)
    assert (
        len({(box.x, box.y) for box in boxes}) == 5
        and width >= max(box.x for box in boxes) + drawing.WIDTH
    )
    assert drawing.boxes({}) == ([], 0, 0) and height >= 2 * drawing.HEIGHT


def test_the_critical_path_is_what_the_end_waited_for() -> None:
    needs = {"a": [], "b": [], "c": ["a", "b"], "d": ["c"], "alone": []}
    assert drawing.critical_path(needs, {"a": 5, "b": 9, "c": 12, "d": 20, "alone": 3}) == [
        "b",
        "c",
        "d",
    ]
    assert drawing.critical_path(needs, {"a": 1, "b": 2, "d": 3}) == ["b", "d"], "c ran nothing"
    assert drawing.critical_path(needs, {}) == []


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 20)), max_size=40))
def test_there_are_as_many_lanes_as_attempts_at_once(times: list[tuple[float, float]]) -> None:
    bars = [
        TimelineBar("", "s", begun, begun + took, f"{n}", "done")
        for n, (begun, took) in enumerate(times)
    ]
    found = drawing.lanes(bars)
    rows = found.get(("", "s"), [])
    assert sorted(bar.name for row in rows for bar in row) == sorted(bar.name for bar in bars)
    assert all(
        before.ended <= after.begun for row in rows for before, after in itertools.pairwise(row)
    )
    assert len(rows) == max(
        (sum(other.begun <= bar.begun < other.ended for other in bars) for bar in bars), default=0
    )


def test_a_spike_survives_thinning_and_curves_share_their_x() -> None:
    spiky = [(float(n), 1000.0 if n == 7777 else 1.0) for n in range(10_000)]
    other = [(float(n), 2.0) for n in range(5000)]
    xs, (a, b) = drawing.align_curves([spiky, other], 600)
    assert len(xs) == len(a) == len(b) == 600 and xs == sorted(xs)
    assert (
        max(y for y in a if y is not None) == 1000.0
        and {y for y in b if y is not None} == {2.0}
        and b[-1] is None
    )
    assert drawing.align_curves([[(0.0, 1.0), (2.0, 3.0)], [(1.0, 2.0)]]) == (
        [0.0, 1.0, 2.0],
        [[1.0, None, 3.0], [None, 2.0, None]],
    )
    assert drawing.align_curves([]) == ([], [])


def test_smoothing_is_not_drawn_to_zero_at_its_beginning() -> None:
    assert drawing.smooth([(0, 4.0), (1, 4.0), (2, 4.0)], 0.9) == [
        (0, 4.0),
        (1, 4.0),
        (2, 4.0),
    ] or all(abs(y - 4.0) < 1e-9 for _, y in drawing.smooth([(0, 4.0), (1, 4.0), (2, 4.0)], 0.9))
    assert drawing.smooth([(0, 1.0), (1, 3.0)], 0) == [(0, 1.0), (1, 3.0)]


def test_one_number_in_a_thousand_does_not_flatten_the_others() -> None:
    curve = [(float(n), 1e17 if n in (500, 900) else 1.0) for n in range(2000)]
    assert (
        drawing.frame([curve, [(0.0, 5.0), (1.0, 2.0)]]) == (1.0, 5.0) and drawing.frame([]) is None
    )


def test_ticks_are_round() -> None:
    assert (
        drawing.ticks(1.4) == [0.0, 0.5, 1.0]
        and drawing.ticks(5400) == [0, 1000, 2000, 3000, 4000, 5000]
        and drawing.ticks(0) == [0.0]
    )


@given(st.text())
def test_text_of_strangers_hides_nothing(text: str) -> None:
    said = visible(text)
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]", said
    )


def test_a_log_is_shown_as_it_would_stand_on_a_terminal() -> None:
    assert (
        log_lines(b"10%\r50%\r100%\r\n\x1b[31mred\x1b[0m \x1b]0;title\x07x\n" + "a\u202eb".encode())
        == "100%\nred x\na<U+202E>b"
    )
    assert log_lines(b"1\n2\n3\n", 2) == "2\n3" and log_lines(b"") == ""
