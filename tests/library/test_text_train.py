"""Claims about the trainers of `sft@1` and `cpt@1`, run as programs of their own: what a kill leaves, what resumes from what, what is refused."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.library.siblings import siblings
from tests.system.test_sft_trainer import (
    BASE,
    ROOT,
    TOPICS,
    TRAINERS,
    checkpoints,
    launched,
    program,
    run,
    signal_at,
)

LIBRARY = ROOT / "fixtures" / "datasets" / "python-library"
QUESTIONS = ROOT / "fixtures" / "datasets" / "python-questions" / "questions.jsonl"
STEPS = 12

pytestmark = pytest.mark.xdist_group("text")


def prepare(
    data: Path, out: Path, *more: object, name: str = "text_data.py", base: Path = BASE
) -> str:
    done = run(
        program(
            name,
            "--data",
            data,
            "--base",
            base,
            "--out",
            out,
            "--max-length",
            128,
            "--packing",
            "true",
            "--eval-fraction",
            0.15,
            *more,
        )
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def training(
    tokens: Path,
    out: Path,
    *more: object,
    processes: int = 1,
    max_steps: int = STEPS,
    base: Path = BASE,
) -> list[str]:
    """A later flag goes over an earlier one."""
    alone = program(
        "text_train.py", "--data", tokens, "--base", base, "--out", out / "weights", "--history", out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--init", "random", "--max-steps", max_steps, "--rank", 8, "--alpha", 16, "--global-batch", 16,
        "--micro-batch", 8, "--save-every", 5, "--learning-rate", 0.01, "--warmup-steps", 2, "--decay-steps", 20, "--weight-decay", 0.1, *more,
    )  # fmt: skip
    return launched(alone, processes) if processes > 1 else alone


METHODS = {
    "lora": ("--train-embeddings", "--embedding-rate", 0.5, "--rank-stabilized", "--dropout", 0.1),
    "full": ("--method", "full"),
}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("library") / "tokens"
    prepare(LIBRARY, out, "--format", "text")
    return out


@pytest.fixture(scope="session")
def trained(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trainings that nobody disturbed, one of each method, one with a launcher."""
    made = {}
    for method, flags in METHODS.items():
        made[method] = tmp_path_factory.mktemp(method)
        argv = training(library, made[method], *flags)
        done = run(launched(argv) if method == "lora" else argv, RECIPE_WORLD_SIZE="1")
        assert done.returncode == 0, done.stderr
    return made


def weights(out: Path) -> dict[str, bytes]:
    """What was learned, without the record of how."""
    return {
        file.name: file.read_bytes()
        for file in sorted((out / "weights").iterdir())
        if file.name != "training.json"
    }


@pytest.mark.slow
@pytest.mark.parametrize(("method", "processes"), [("lora", 1), ("full", 2)])
def test_a_killed_training_ends_in_the_same_bits(
    method: str, processes: int, library: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """Killed at step 7 of 9, resumed at 5 and continued to 12.  Two processes learn the very bits that one learns."""
    flags, undisturbed = METHODS[method], trained[method]
    metrics = tmp_path / "metrics.jsonl"
    env = {"RECIPE_WORLD_SIZE": str(processes), "RECIPE_METRICS": str(metrics)}
    signal_at(
        "step 7/9",
        training(library, tmp_path, *flags, processes=processes, max_steps=9),
        signal.SIGKILL,
        tmp_path / "gate",
        **env,
    )
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-5"]
    assert not (tmp_path / "weights").exists()
    board = ("--tensorboard", tmp_path / "board")
    done = run(
        training(
            library,
            tmp_path,
            *flags,
            *board,
            "--resume",
            checkpoints(tmp_path)[-1],
            processes=processes,
        ),
        **env,
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at step 5" in done.stdout
    assert weights(tmp_path) == weights(undisturbed)
    assert (tmp_path / "history.jsonl").read_bytes() == (undisturbed / "history.jsonl").read_bytes()
    assert [path.name for path in checkpoints(tmp_path)] == [
        path.name for path in checkpoints(undisturbed)
    ]
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in told] == list(range(1, STEPS + 1))
    assert len(list((tmp_path / "board").iterdir())) == 1


@pytest.mark.slow
def test_a_training_whose_machine_is_taken_away_saves_the_step_it_is_at(
    library: Path, tmp_path: Path
) -> None:
    argv = launched(training(library, tmp_path, "--save-every", 1000))
    said = signal_at(
        "step 3/", argv, signal.SIGTERM, tmp_path / "gate", whole=False, RECIPE_WORLD_SIZE="1"
    )
    (saved,) = checkpoints(tmp_path)
    step = json.loads((saved / "recipe.json").read_text())["step"]
    assert 3 <= step < STEPS and f"asked to end; saved step {step}" in said


@pytest.mark.proof
def test_a_model_trained_on_one_text_reads_on_in_another(
    library: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    """Every weight on the standard library; then, frozen, with an adapter on the language reference, of which it learns more than it knew."""
    base, topics, out = tmp_path / "base", tmp_path / "topics", tmp_path / "out"
    done = run(
        program(
            "text_export.py",
            "--trainer",
            "cpt",
            "--kind",
            "merged",
            "--base",
            BASE,
            "--weights",
            trained["full"] / "weights",
            "--out",
            base,
        )
    )
    assert "a model, fully trained" in done.stdout, done.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {
        file.name for file in base.iterdir()
    }
    prepare(TOPICS, topics, base=base)
    flags = ("--init", "pretrained", "--train-embeddings", "--decay-steps", 0)
    assert (
        run(
            training(topics, out, *flags, base=base, max_steps=30), RECIPE_WORLD_SIZE="1"
        ).returncode
        == 0
    )
    model, report = tmp_path / "model", tmp_path / "report"
    assert (
        run(
            program(
                "text_export.py",
                "--trainer",
                "cpt",
                "--kind",
                "merged",
                "--base",
                base,
                "--weights",
                out / "weights",
                "--out",
                model,
            )
        ).returncode
        == 0
    )
    assert not (model / "adapter_config.json").exists()
    done = run(
        program(
            "text_evaluate.py",
            "--data",
            topics,
            "--base",
            base,
            "--model",
            model,
            "--micro-batch",
            8,
            "--report",
            report,
        )
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((report / "report.json").read_text())
    assert (
        found["perplexity_before"] < 800
    )  # 594: it had read something like it; one that knows nothing is at 1,037
    assert found["times_better"] > 1.3


@pytest.mark.slow
def test_of_a_conversation_the_answers_are_learned(tmp_path: Path) -> None:
    """Questions about the standard library: as JSON lines, CSV and Parquet they are the same tokens, and a minute part of a training answers better."""
    import csv

    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    with (tmp_path / "questions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["messages"])
        table.writerows([json.dumps(row["messages"])] for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "questions.parquet")
    stores = []
    for file in (QUESTIONS, tmp_path / "questions.csv", tmp_path / "questions.parquet"):
        tokens = tmp_path / f"tokens{file.suffix}"
        assert "515 rows (messages)" in prepare(file, tokens, name="sft_data.py")
        manifest = json.loads((tokens / "manifest.json").read_text())
        stores.append(manifest["arrays"])
    assert stores[0] == stores[1] == stores[2]
    assert (
        manifest["bad_rows"] == 0
        and (tokens / "learned.bin").read_bytes().count(1) < 0.8 * manifest["tokens"]
    )
    done = run(
        training(
            tokens,
            tmp_path,
            "--train-embeddings",
            "--eval-every",
            10,
            "--decay-steps",
            0,
            max_steps=20,
        ),
        RECIPE_WORLD_SIZE="1",
    )
    assert done.returncode == 0, done.stderr
    looked = {
        line["step"]: line
        for line in map(json.loads, (tmp_path / "history.jsonl").read_text().splitlines())
    }
    assert (
        looked[20]["eval_loss"] < looked[10]["eval_loss"] - 0.1
        and looked[20]["loss"] < looked[1]["loss"] - 1
    )


@pytest.mark.parametrize("wide", [False, True])
def test_a_question_is_read_and_not_learned(
    wide: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(TRAINERS))
    try:
        model, tokens = importlib.import_module("text_model"), importlib.import_module("tokens")
        store = tokens.Writer(tmp_path, wide)
        store.add([5, 6, 7, 8], [0, 0, 1, 1])
        store.add([9, 10], None)
        store.close({"train": [[0, 1], [1]], "held_out": []}, {})
        batch = model.batch_of(
            tokens.Tokens(tmp_path, "train"), [0, 1], importlib.import_module("torch").device("cpu")
        )
    finally:
        for name in ("loop", "tokens", "text_model"):
            sys.modules.pop(name, None)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10], [9, 10, 0, 0, 0, 0]]
    assert batch.targets.tolist() == [
        [-100, 7, 8, -100, 10, -100],
        [10, -100, -100, -100, -100, -100],
    ]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_a_part_of_one_long_text_can_be_held_out(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("".join(file.read_text() for file in sorted(LIBRARY.glob("*.txt"))))
    said = prepare(book, tmp_path / "tokens", "--format", "text")
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["rows_held_out"]) == (4, 1) and "4 rows (text)" in said


def test_text_that_is_none_is_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\n")
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n{"text": 7}\n')
    done = run(
        program(
            "text_data.py",
            "--data",
            tmp_path,
            "--base",
            BASE,
            "--out",
            tmp_path / "out",
            "--max-length",
            128,
            "--format",
            "text",
        )
    )
    assert done.returncode == 1
    assert (
        "a.txt:2: not UTF-8: byte 0xff" in done.stderr
        and 'b.jsonl:2: "text" is a number, a string is expected' in done.stderr
    )


def test_a_rate_that_falls_before_it_has_risen_is_refused(library: Path, tmp_path: Path) -> None:
    done = run(training(library, tmp_path, "--warmup-steps", 20))
    assert (done.returncode, done.stderr) == (
        1, "train: decay_steps 20 is not beyond warmup_steps 20: the rate would never be at its peak\n"
    )  # fmt: skip


def test_a_checkpoint_of_the_other_method_is_refused(
    library: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    done = run(
        training(library, tmp_path, *METHODS["full"], "--resume", checkpoints(trained["lora"])[-1])
    )
    assert (
        done.returncode == 1
        and "it was made by another training" in done.stderr
        and "method was lora, is full" in done.stderr
    )


def test_auto_is_32_bits_on_a_cpu_and_the_record_says_so(trained: dict[str, Path]) -> None:
    made = json.loads((trained["full"] / "weights" / "training.json").read_text())
    assert (made["precision"], made["method"], made["max_steps"], made["world"]) == (
        "no",
        "full",
        STEPS,
        1,
    )


def test_embeddings_have_a_rate_of_their_own() -> None:
    with siblings():
        from adapters import adapted, groups  # type: ignore[import-not-found]
        from text_model import load_base  # type: ignore[import-not-found]

        options = Namespace(
            seed=0, method="lora", rank=4, alpha=8, rank_stabilized=False, dora=False, dropout=0, train_embeddings=True, embedding_rate=0.5,
            weight_decay=0.1,
        )  # fmt: skip
        model = adapted(load_base(BASE, "random", 0, "no"), options)
        names = {id(weight): name for name, weight in model.named_parameters()}
        found = {
            group.times: (group.decay, {"lora" in names[id(weight)] for weight in group.weights})
            for group in groups(model, options)
        }
    assert found == {0.5: (0.1, {False}), 1.0: (0.1, {True})}
