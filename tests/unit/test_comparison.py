"""Which result of a step is best, in which inputs results differ, and how they are ordered: pure decisions over rows."""

from __future__ import annotations

from typing import Any

import pytest

from runner.planning.run_view import TOTALS
from runner.survey.comparison import (
    Criterion,
    Result,
    as_row,
    choose_criterion,
    compare,
    find_best,
    find_differing_inputs,
    is_outcome,
    lower_is_better,
    matrix_values,
)
from runner.survey.results import Metric

Row = dict[str, Any]


def result(
    id: str = "train[lr=1]",
    *,
    state: str = "DONE",
    values: Row | None = None,
    run: str = "r1",
    **metrics: Any,
) -> Result:
    return Result(
        id,
        run,
        1.0,
        state,
        "",
        2.0,
        "",
        "",
        values or {},
        {name: Metric(last, 0.0, 9.0) for name, last in metrics.items()},
    )


@pytest.mark.parametrize(
    ("metrics", "metric", "least"),
    [
        ({"loss": 1, "eval_loss": 2, "acc": 3}, "eval_loss", True),
        ({"loss": 1, "val_acc": 2}, "val_acc", False),
        ({"acc": 1, "loss": 2}, "loss", True),
        ({"acc": 1, "f1": 2}, "acc", False),
        ({"step": 1, "lr": 2, "time_data": 3, "score": 4}, "score", False),
    ],
)
def test_without_select_a_metric_of_held_out_data_comes_first(
    metrics: Row, metric: str, least: bool
) -> None:
    assert choose_criterion([result(**metrics)], {}) == Criterion(metric, least)


def test_select_says_what_is_compared() -> None:
    found = [
        result("s[rank=1]/train[lr=1]", loss=1, acc=0.1),
        result("s[rank=2]/train[lr=1]", loss=2, acc=0.2),
    ]
    (table,) = compare(found, {"s/train": Criterion("acc", False)})
    assert table.by == Criterion("acc", False) and table.best is found[1]
    assert compare([result(step=3)], {})[0].by is None


def test_what_failed_or_has_no_number_is_never_best_and_comes_last() -> None:
    found = [
        result(state="FAILED", loss=0.1),
        result(loss="nan"),
        result(acc=1),
        result(loss=3),
        result(loss=2),
    ]
    (table,) = compare(found, {})
    assert [each.metrics.get("loss", Metric("", None, None)).last for each in table.results] == [
        2,
        3,
        "nan",
        "",
        0.1,
    ]
    assert table.best is found[4] and find_best(found[:3], Criterion("loss", True)) is None


def test_an_input_sorts_by_size_and_the_best_stays_marked() -> None:
    found = [
        result(values={"lr": lr, "note": note}, loss=loss)
        for lr, note, loss in ((10, "b", 1), (9.5, "a", 2), (None, "c", 3))
    ]
    (table,) = compare(found, {}, sort="lr")
    assert [row["lr"] for row in table.flat()] == [9.5, 10, None] and [
        row["best"] for row in table.flat()
    ] == [False, True, False]
    assert compare(found, {}, sort="loss", least=False)[0].best is found[2]


def test_only_inputs_that_differ_are_of_interest() -> None:
    assert find_differing_inputs(
        [result(values={"a": 1, "b": 1, "c": 1}), result(values={"a": 1, "b": 1.5})]
    ) == ["b", "c"]
    assert find_differing_inputs([result(values={"a": 1})]) == []


def test_a_metric_that_is_called_like_an_input_has_a_column_of_its_own() -> None:
    row = as_row(result(values={"loss": "mse", "run": 7}, loss=1.5, acc=0.5), is_best=True)
    assert row["loss"] == "mse" and row["metrics.loss"] == 1.5 and row["min metrics.loss"] == 0.0
    assert (
        row["run"] == "r1"
        and row["inputs.run"] == 7
        and row["acc"] == 0.5
        and row["max acc"] == 9.0
    )


def test_matrix_values_are_read_from_an_id() -> None:
    assert (
        matrix_values("s[rank=4]/train[file=a%2Fb%2Cc%3D1,lr=1]")
        == {"rank": "4", "file": "a/b,c=1", "lr": "1"}
        and matrix_values("train") == {}
    )


def test_of_a_loss_less_is_better() -> None:
    assert (
        lower_is_better("eval_loss")
        and lower_is_better("WER")
        and lower_is_better("perplexity")
        and not lower_is_better("accuracy")
        and not lower_is_better("reward")
    )


def test_how_many_steps_a_training_has_is_no_result() -> None:
    assert not any(map(is_outcome, ("step", "epoch", "time_step", *TOTALS)))
    assert is_outcome("loss") and is_outcome("eval_loss")
