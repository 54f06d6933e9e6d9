"""How long a machine can be paid for."""

from __future__ import annotations

import pytest

from runner.hosts.renting.money import affordable_seconds, committed_cost, stop_time


def test_a_machine_is_paid_for_until_just_before_its_share_of_the_money_is_spent() -> None:
    assert (
        affordable_seconds(2.0, 1.0) == 7200 - 120
        and affordable_seconds(2.0, 1.0, 2) == 3600 - 120
        and affordable_seconds(0.01, 36.0) == pytest.approx(0.9)
    )
    assert affordable_seconds(-1.0, 1.0) == 0.0


def test_a_run_leaves_its_machine_in_time_to_bring_home_what_was_made() -> None:
    assert (
        stop_time(0.0, 7200.0) == 7020.0
        and stop_time(100.0, 110.0) == 108.0
        and committed_cost(3.6, 0.0, 10.0) == pytest.approx(0.01)
    )
