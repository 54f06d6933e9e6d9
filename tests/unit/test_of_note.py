"""Which metrics are results, and which only say how a training went."""

from __future__ import annotations

from runner.planning.run_view import TOTALS
from runner.survey.comparison import of_note


def test_how_many_steps_a_training_has_is_no_result() -> None:
    assert not any(of_note(name) for name in ("step", "epoch", "time_step", *TOTALS))
    assert of_note("loss") and of_note("eval_loss")
