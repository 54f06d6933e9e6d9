"""Claims about `classify@1`: what its rows may be, what its trainer learns, what a kill leaves, and what comes out."""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import signal
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.library.siblings import siblings
from tests.library.smoke import smoke
from tests.system.test_sft_trainer import program, run, signal_at

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "fixtures" / "tiny-llama"
INTENTS = ROOT / "fixtures" / "datasets" / "intents" / "rows.jsonl"
LABELS = ["delivery", "invoice", "login", "refund"]
STEPS, RATE = 16, 0.003

pytestmark = pytest.mark.xdist_group("classify")


@pytest.fixture(scope="module")
def modules() -> Iterator[Namespace]:
    names = ("classify_data", "classify_evaluate", "classify_model", "splits", "tuned")
    with siblings():
        yield Namespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def base(modules: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of these labels that knows nothing: base and head alike, for everybody who loads it."""
    folder = tmp_path_factory.mktemp("hub") / "base"
    shutil.copytree(BASE, folder)
    modules.tuned.load_judge(BASE, "random", 0, "no", labels=LABELS).save_pretrained(folder)
    return folder


def prepared(modules: Namespace, data: Path, out: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """The manifest, and what was said."""
    usual = {"columns": "{}", "labels": [], "max_length": 96, "eval_fraction": 0.0, "max_bad_rows": 0, "seed": 0, "data": data, "base": BASE, "out": out}  # fmt: skip
    with redirect_stdout(StringIO()) as said:
        print(modules.classify_data.prepare(Namespace(**{**usual, **more})))
    return json.loads((out / "manifest.json").read_text()), said.getvalue()


@pytest.fixture(scope="module")
def rows(modules: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("classify") / "rows"
    manifest, _ = prepared(modules, INTENTS, out, eval_fraction=0.25)
    assert manifest["labels"] == LABELS and min(manifest["examples"].values()) > 40
    return out


def training(rows: Path, base: Path, out: Path, *more: object) -> list[str]:
    return program(
        "classify_train.py", "--data", rows, "--base", base, "--out", out / "weights", "--history", out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--method", "full", "--max-steps", STEPS, "--global-batch", 16, "--micro-batch", 8,
        "--save-every", 5, "--learning-rate", RATE, "--warmup-steps", 0, "--eval-every", 8, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(rows: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nobody disturbed."""
    out = tmp_path_factory.mktemp("trained")
    done = run(training(rows, base, out))
    assert done.returncode == 0, done.stderr
    return out


def history(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


# -- rows -------------------------------------------------------------------------------------------------------------------------------------------------


def table(folder: Path, *rows: dict[str, Any], name: str = "d.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]


ORDERS: dict[str, tuple[list[Any], dict[str, Any], list[str], list[int]]] = {
    "words are sorted": (["b", "a", "b"], {}, ["a", "b"], [1, 0, 1]),
    "numbers are their own places": ([2, 0, 2], {}, ["0", "1", "2"], [2, 0, 2]),
    "numbers of a table with an empty cell": ([1.0, "0.0"], {}, ["0", "1"], [1, 0]),
    "numbers far apart are sorted as numbers": ([10, 5000, 9], {}, ["9", "10", "5000"], [1, 2, 0]),
    "truth": ([True, False], {}, ["false", "true"], [1, 0]),
    "as given": (["b", "a"], {"labels": ["b", "a", "c"]}, ["b", "a", "c"], [0, 1]),
    "names of numbers": ([1, 0], {"labels": ["no", "yes"]}, ["no", "yes"], [1, 0]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_labels_have_an_order_that_does_not_hang_on_that_of_the_rows(
    name: str, modules: Namespace, tmp_path: Path
) -> None:
    labels, more, order, numbers = ORDERS[name]
    for turn in (1, -1):
        data = table(tmp_path, *labelled(*labels)[::turn])
        manifest, _ = prepared(modules, data, tmp_path / str(turn), **more)
        assert manifest["labels"] == order
        learned = modules.splits.Splits(tmp_path / str(turn)).train["label"][:]
        assert learned == numbers[::turn]


def test_a_base_with_a_head_of_these_labels_keeps_its_order(
    modules: Namespace, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    config = json.loads((base / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "sad", "1": "glad", "2": "mad"}}  # fmt: skip
    (base / "config.json").write_text(json.dumps(config))
    data = table(tmp_path, *labelled("glad", "sad"))
    assert prepared(modules, data, tmp_path / "a", base=base)[0]["labels"] == ["sad", "glad", "mad"]
    other = table(tmp_path, *labelled("glad", "good"))
    assert prepared(modules, other, tmp_path / "b", base=base)[0]["labels"] == ["glad", "good"]


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no label": ([{"text": "a"}], {}, r'd.jsonl:1: no column "label"; it has: text'),
    "a label that is kept secret": (labelled("a", -1), {}, r'd.jsonl:2: "label" is -1, as data sets have it where a label is kept secret'),
    "a number between classes": (labelled("a", 0.5), {}, r'd.jsonl:2: "label" is 0.5: classes are learned'),
    "a score of a table": (labelled("a", "0.5"), {}, r'd.jsonl:2: "label" is 0.5: classes are learned'),
    "several labels": (labelled("a", ["b"]), {}, r'd.jsonl:2: "label" is a list: one label a row'),
    "an empty label": (labelled("a", " "), {}, r'd.jsonl:2: "label" is empty'),
    "null": (labelled("a", None), {}, r'd.jsonl:2: "label" is null, a string or a whole number'),
    "an empty text": ([{"text": " ", "label": 1}], {}, r'd.jsonl:1: "text" is empty'),
    "one label": (labelled("a", "a"), {}, 'all rows have the label "a": there is nothing to tell apart'),
    "texts for labels": (labelled(*map(str, range(0, 3000, 100))), {}, "30 different labels in 30 rows: the column of labels"),
    "a label that is not named": (labelled("a", "b"), {"labels": ["a", "c"]}, '"b" is none of labels=a,c'),
    "a name twice": (labelled("a", "b"), {"labels": ["a", "a"]}, 'labels names "a" twice'),
    "too long for the base": (labelled("a", "b"), {"max_length": 100_000}, r"more than the \d+ tokens that the base model takes: say max_length="),
    "one text": ([{"text": "t", "label": label} for label in "ab"], {"eval_fraction": 0.5}, "rows of one text cannot be both learned and held out"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_learned_are_refused_with_what_to_do(
    name: str, modules: Namespace, tmp_path: Path
) -> None:
    data, more, said = REFUSED[name]
    with pytest.raises(modules.classify_data.BadData, match=said):
        prepared(modules, table(tmp_path, *data), tmp_path / "out", **more)


def test_what_makes_figures_worthless_is_a_warning(modules: Namespace, tmp_path: Path) -> None:
    data = [*labelled(*["a"] * 20, "b"), {"text": "text 0", "label": "b"}, *labelled("a")]
    data.append({"text": "long " * 200, "label": "a"})
    _, said = prepared(modules, table(tmp_path, *data), tmp_path / "out", labels=["a", "b", "c"])
    assert "1 rows truncated at 96 tokens (4.2%): raise max_length" in said
    assert "1 rows have the text of an earlier one and another label" in said
    assert '91.7% of the rows are "a"' in said and "judge by macro-F1" in said
    assert "no row to learn from has the label c" in said
    assert "held-out" not in said


def test_the_rows_that_ship_are_what_their_program_makes() -> None:
    spec = importlib.util.spec_from_file_location("intents", INTENTS.parents[1] / "make_intents.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    assert program.rows() == [json.loads(line) for line in INTENTS.read_text().splitlines()]


def test_tokens_are_those_of_transformers_for_texts_and_for_pairs(
    modules: Namespace, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    data = [{"s": "one " * 60, "t": "two " * 60, "y": 1}, {"s": "one", "y": 0}]
    columns = json.dumps({"text": "s", "text_pair": "t", "label": "y"})
    prepared(modules, table(tmp_path, *data), tmp_path / "out", columns=columns)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    wanted = [
        tokenizer(*texts, truncation=True, max_length=96)["input_ids"]
        for texts in ((data[0]["s"], data[0]["t"]), (data[1]["s"],))
    ]
    found = modules.splits.Splits(tmp_path / "out").train
    assert found["input_ids"][:] == wanted and found["label"][:] == [1, 0]


# -- training -------------------------------------------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_plain_script(
    trained: Path, rows: Path, base: Path, modules: Namespace, tmp_path: Path
) -> None:
    """transformers' own Trainer on the same rows in the same order, with nothing of ours."""
    from datasets import Dataset
    from transformers import (  # fmt: skip
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    at = {row["text"]: LABELS.index(row["label"]) for row in map(json.loads, INTENTS.read_text().splitlines())}  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(base)
    by_ids = {tuple(tokenizer(text)["input_ids"]): text for text in at}
    texts = [
        by_ids[tuple(row["input_ids"])]
        for row in modules.splits.scheduled(
            modules.splits.Splits(rows).train, Namespace(seed=0, max_steps=STEPS, global_batch=16)
        )
    ]
    tokenizer.pad_token = tokenizer.eos_token
    data = Dataset.from_list([{**tokenizer(text, truncation=True, max_length=96), "label": at[text]} for text in texts])  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=len(LABELS))
    model.config.pad_token_id = tokenizer.pad_token_id
    plain = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=8, gradient_accumulation_steps=2, learning_rate=RATE,
            lr_scheduler_type="constant", weight_decay=0.0, logging_steps=1, save_strategy="no", report_to="none",
            train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=data,
        data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    plain.train()
    theirs = [told["loss"] for told in plain.state.log_history if "loss" in told]
    ours = [told["loss"] for told in history(trained)]
    assert len(ours) == STEPS and ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0] / 2


def test_a_training_that_is_killed_at_any_step_ends_in_the_same_bits(
    trained: Path, rows: Path, base: Path, tmp_path: Path
) -> None:
    step = random.randrange(6, STEPS)
    signal_at(f"step {step}/", training(rows, base, tmp_path), signal.SIGKILL, tmp_path / "gate")
    latest = max(
        (tmp_path / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name[11:])
    )
    done = run(training(rows, base, tmp_path, "--resume", latest))
    assert done.returncode == 0, done.stderr
    for name in ("history.jsonl", "weights/model.safetensors", "weights/config.json"):
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes(), f"killed at {step}"


def test_it_beats_the_untrained_head_on_rows_that_it_never_saw_with_every_seed(
    trained: Path, rows: Path, base: Path, modules: Namespace, tmp_path: Path
) -> None:
    for seed in range(3):
        out = trained if seed == 0 else tmp_path / str(seed)
        if seed:
            done = run(training(rows, base, out, "--seed", seed))
            assert done.returncode == 0, done.stderr
        report = tmp_path / f"report-{seed}"
        done = run(
            program(
                "classify_evaluate.py", "--data", rows, "--base", base, "--model", out / "weights", "--report", report,
                "--micro-batch", 16,
            )
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads((report / "report.json").read_text())
        before = found["before"]
        assert found["accuracy"] > max(before["accuracy"], found["accuracy_of_most"]) + 0.3
        assert found["macro_f1"] > before["macro_f1"] + 0.3 and found["loss"] < before["loss"]
        assert "It learned to tell the labels" in (report / "report.md").read_text()


def test_what_comes_out_names_its_labels(trained: Path) -> None:
    from transformers import pipeline

    row = json.loads(INTENTS.read_text().splitlines()[0])
    tell = pipeline("text-classification", model=str(trained / "weights"), device="cpu")
    (found,) = tell([row["text"]])
    assert found["label"] == row["label"]


def test_an_adapter_on_an_encoder_learns_pairs_and_loads_with_its_head(
    modules: Namespace, tmp_path: Path
) -> None:
    """Models of this kind have no end token, and tell the second text by token types; their head has another name."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(60))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))  # type: ignore[assignment]
    base = tmp_path / "base"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]", model_max_length=32,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(base)  # fmt: skip
    BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=64
    ).save_pretrained(base)  # fmt: skip
    data = [{"text": f"w{n}", "text_pair": f"w{n + (n % 2)} w1", "label": n % 2} for n in range(40)]
    with pytest.raises(modules.classify_data.BadData, match="say max_length=32"):
        prepared(modules, table(tmp_path, *data), tmp_path / "rows", base=base, max_length=64)
    prepared(modules, table(tmp_path, *data), tmp_path / "rows", base=base, max_length=16)
    assert modules.splits.Splits(tmp_path / "rows").train[0]["token_type_ids"][-2:] == [1, 1]
    more = ["--init", "random", "--method", "lora", "--rank", 4, "--max-steps", 2, "--checkpoint-activations"]  # fmt: skip
    done = run(training(tmp_path / "rows", base, tmp_path, *more))
    assert done.returncode == 0, done.stderr
    model = modules.tuned.load(base, tmp_path / "weights", judge=True).eval()
    head = model.base_model.model.classifier.modules_to_save["default"].weight
    fresh = modules.tuned.load_judge(base, "random", 0, "no", labels=["0", "1"]).classifier.weight
    assert head.shape == (2, 16) and not torch.equal(head, fresh)


@pytest.mark.slow
def test_the_whole_recipe_learns_and_describes_what_it_made(tmp_path: Path) -> None:
    results = smoke("classify@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    # Of 56 rows, when this was written: all right, 16 % before.
    assert report["accuracy"] > 0.9 and report["macro_f1"] > 0.9
    card = (results / "model" / "README.md").read_text()
    assert "text-classification" in card and "0 delivery, 1 invoice" in card
