"""`eval@1`: the error of a difference is that of the same documents answered twice, and what is wrong is named before a model is loaded."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import runner
from tests.library.siblings import siblings
from tests.library.smoke import smoke

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "fixtures" / "eval-tasks"


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    with siblings():
        import eval_table  # type: ignore[import-not-found]

        yield eval_table


@pytest.fixture(scope="module")
def scores() -> Iterator[Any]:
    with siblings():
        import eval_scores  # type: ignore[import-not-found]

        yield eval_scores


def lying(
    folder: Path,
    results: dict[str, dict[str, float]],
    better: dict[str, dict[str, bool]],
    documents: dict[str, Sequence[Any]],
) -> Path:
    """What eval_scores writes, by hand: `documents` are by TASK:METRIC."""
    folder.mkdir()
    counts = {name.partition(":")[0]: len(each) for name, each in documents.items()}
    told = {
        "model": folder.name,
        "results": results,
        "higher_is_better": better,
        "documents": counts,
        "lm_eval": "0.4.13",
    }
    (folder / "scores.json").write_text(json.dumps(told))
    lines = [
        {
            "task": name.partition(":")[0],
            "filter": "none",
            "document": f"{number:04d}",
            "metrics": {name.partition(":")[2]: value},
        }
        for name, each in documents.items()
        for number, value in enumerate(each)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def rows(
    table: Any, before: Path, after: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    monkeypatch.setattr(
        "sys.argv", ["compare", "--before", str(before), "--after", str(after), "--out", str(out)]
    )
    table.main()
    found: list[dict[str, Any]] = json.loads((out / "table.json").read_text())["rows"]
    return found


def test_the_error_of_a_difference_is_that_of_the_differences(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models that are right in nearly the same documents: 5 of 200 more is a difference, though each score's own error is as large."""
    draws = random.Random(0)
    first = [draws.random() < 0.5 for _ in range(200)]
    second = [
        True if number in (3, 20, 41, 77, 150) else right for number, right in enumerate(first)
    ]
    gained = sum(second) - sum(first)
    assert gained >= 2
    folders = [
        lying(
            tmp_path / name,
            {"t": {"acc,none": statistics.mean(each), "acc_stderr,none": 0.03}},
            {"t": {"acc": True}},
            {"t:acc": [*map(float, each)]},
        )
        for name, each in (("before", first), ("after", second))
    ]
    (row,) = rows(table, *folders, tmp_path / "out", monkeypatch)
    differences = [float(one) - float(other) for one, other in zip(second, first, strict=True)]
    assert row["difference"] == pytest.approx(gained / 200)
    assert row["difference_error"] == pytest.approx(statistics.stdev(differences) / math.sqrt(200))
    assert (
        row["after_error"] == pytest.approx(statistics.stdev(map(float, second)) / math.sqrt(200))
        and row["after_error"] > 2 * row["difference_error"]
    )


def test_bits_per_byte_have_the_error_of_a_ratio(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with what drawing the documents anew gives, two thousand times."""
    draws = random.Random(0)
    documents = [
        [-length * draws.gauss(2.4, 0.3), length]
        for length in (draws.randint(100, 2000) for _ in range(60))
    ]

    def score(each: Sequence[Sequence[float]]) -> float:
        return -sum(log for log, _ in each) / sum(length for _, length in each) / math.log(2)

    after = lying(
        tmp_path / "after",
        {"t": {"bits_per_byte,none": score(documents)}},
        {"t": {"bits_per_byte": False}},
        {"t:bits_per_byte": documents},
    )
    (row,) = rows(table, tmp_path / "nothing", after, tmp_path / "out", monkeypatch)
    redrawn = statistics.stdev(score(draws.choices(documents, k=60)) for _ in range(2000))
    assert row["after_error"] == pytest.approx(redrawn, rel=0.1) and row["before"] is None


@pytest.mark.parametrize(
    ("after", "better", "said"),
    [
        (0.70, True, "better"),
        (0.70, False, "worse"),
        (0.30, True, "worse"),
        (0.55, True, "no difference"),
        (0.50, True, "no difference"),
    ],
)
def test_a_difference_is_named_when_it_is_two_errors_large(
    after: float,
    better: bool,
    said: str,
    table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group has no documents of its own: its errors are those that lm-evaluation-harness states, as of independent scores."""
    folders = [
        lying(
            tmp_path / name,
            {"group": {"acc,none": value, "acc_stderr,none": 0.03}},
            {"group": {"acc": better}},
            {},
        )
        for name, value in (("before", 0.5), ("after", after))
    ]
    (row,) = rows(table, *folders, tmp_path / "out", monkeypatch)
    assert row["conclusion"] == said and row["difference_error"] == pytest.approx(
        math.hypot(0.03, 0.03)
    )
    page = (tmp_path / "out" / "table.md").read_text()
    assert (
        f"| group | acc {'↑' if better else '↓'} |  | 0.5000 ± 0.0300 | {after:.4f} ± 0.0300 | {after - 0.5:+.4f} ± 0.0424 | {said} |"
        in page
    )


def test_each_score_is_a_metric_of_the_run(table: Any) -> None:
    told = table.numbers(
        [
            {"task": "a-b", "metric": "exact_match (strict-match)", "before": 0.25, "after": 0.5},
            {"task": "c", "metric": "acc", "before": None, "after": 1.0},
        ]
    )
    assert told == {
        "a_b_exact_match_strict_match": 0.5,
        "a_b_exact_match_strict_match_before": 0.25,
        "c_acc": 1.0,
    }


@pytest.mark.parametrize(
    ("names", "folder", "said"),
    [
        (["topics_choise"], TASKS, 'there is no task "topics_choise": did you mean topics_choice'),
        (
            ["topics_choice.yaml"],
            TASKS,
            "topics_choice.yaml is a file, and tasks are named by what it says as `task:`",
        ),
        (
            ["topics_choice"],
            ROOT / "fixtures" / "tiny-llama",
            "tiny-llama holds no task: no .yaml file in it says `task: NAME`",
        ),
    ],
)
@pytest.mark.slow
def test_a_task_that_is_not_there_is_named(
    names: list[str], folder: Path, said: str, scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import tasks  # type: ignore[import-untyped]

    real = tasks.TaskManager
    # Its own fourteen thousand files are read in the proof.
    monkeypatch.setattr(
        tasks,
        "TaskManager",
        lambda include_path=None, include_defaults=True: real(
            include_path=include_path, include_defaults=False
        ),
    )
    with pytest.raises(scores.CannotEvaluate) as raised:
        scores.tasks(names, folder)
    assert said in str(raised.value)


@pytest.mark.slow
def test_data_that_cannot_be_had_is_named(
    scores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        (TASKS / "topics_text.yaml").read_text().replace("topics.jsonl", "gone.jsonl")
    )
    options = argparse.Namespace(
        tasks=["topics_text"], fewshot=-1, limit=0, chat=False, system=None, seed=0
    )
    from lm_eval.api.model import LM  # type: ignore[import-untyped]

    class Nobody(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any) -> Any: ...
        def loglikelihood_rolling(self, requests: Any) -> Any: ...
        def generate_until(self, requests: Any) -> Any: ...

    with pytest.raises(
        scores.CannotEvaluate, match=r"the data of topics_text cannot be had: .*gone\.jsonl"
    ):
        scores.scores(Nobody(), options, scores.tasks(["topics_text"], tmp_path))


@pytest.mark.proof
def test_an_adapter_is_compared_with_its_base_and_the_base_is_asked_once(tmp_path: Path) -> None:
    results = smoke("eval@1", tmp_path)
    found = {
        row["metric"]: row
        for row in json.loads((results / "report" / "table.json").read_text())["rows"]
    }
    # Of 22 texts that the adapter has not read, when this was written: 3.51 to 2.95 bits a byte, the difference to ± 0.02.
    assert (
        found["bits_per_byte"]["conclusion"] == "better"
        and found["bits_per_byte"]["difference"] < -0.4
    )
    assert found["acc"]["documents"] == 22 and found["acc"]["conclusion"] == "no difference"
    merged = smoke("export@1", tmp_path) / "model"
    planned = runner.plan(
        "eval@1", {"model": str(merged)}, preset="smoke", python="current", workspace=tmp_path
    )
    assert next(verdict.answer for verdict in planned.verdicts) == "fresh"
    alone = runner.run(
        "eval@1",
        {"model": str(merged), "base": None, "init": "pretrained"},
        preset="smoke",
        python="current",
        workspace=tmp_path,
    )
    assert alone.state == "COMPLETED"
    merged_scores = {
        row["metric"]: row
        for row in json.loads(
            (tmp_path / "out" / "eval@1" / "latest" / "report" / "table.json").read_text()
        )["rows"]
    }
    assert {name: row["before"] for name, row in merged_scores.items()} == {
        "acc": None,
        "bits_per_byte": None,
    }
    assert merged_scores["bits_per_byte"]["after"] == pytest.approx(
        found["bits_per_byte"]["after"], rel=1e-5
    )


@pytest.mark.proof
def test_lm_evaluation_harness_brings_tasks_and_a_misspelt_one_is_reported(scores: Any) -> None:
    with pytest.raises(
        scores.CannotEvaluate, match='there is no task "hellaswagg": did you mean hellaswag'
    ):
        scores.tasks(["hellaswagg"], None)
    assert "arc_easy" in scores.tasks(["arc_easy"], None).all_tasks
