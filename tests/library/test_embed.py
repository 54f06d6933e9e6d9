"""Claims about `embed@1`: what its rows may be, what its trainer learns, what a kill leaves, and what comes out."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
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
from tests.system.test_sft_trainer import launched, program, run, signal_at

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "fixtures" / "tiny-llama"
QUESTIONS = ROOT / "fixtures" / "datasets" / "questions" / "rows.jsonl"
STEPS, BATCH, RATE = 24, 16, 0.0005
DIMENSIONS = [64, 32]

pytestmark = pytest.mark.xdist_group("embed")


@pytest.fixture(scope="module")
def modules() -> Iterator[Namespace]:
    names = ("embed_base", "embed_data", "embed_evaluate", "embed_model", "embed_train", "splits")
    with siblings():
        yield Namespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def base(modules: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers model that knows nothing: alike for everybody who loads it."""
    folder = tmp_path_factory.mktemp("hub") / "base"
    drawn(modules, pooling="mean").save_pretrained(str(folder))
    return folder


def drawn(modules: Namespace, base: Path = BASE, pooling: str = "auto", **more: Any) -> Any:
    usual = {"prompts": {"query": "", "document": ""}, "max_length": 96}
    return modules.embed_model.load(base, "random", 0, "no", pooling=pooling, **{**usual, **more})


def prepared(modules: Namespace, data: Path, out: Path, **more: Any) -> tuple[dict[str, Any], str]:
    """The manifest, and what was said."""
    usual = {
        "columns": "{}", "prompts": "{}", "loss": "mnrl", "pooling": "auto", "matryoshka": [], "global_batch": 2, "max_length": 96,
        "eval_fraction": 0.0, "max_bad_rows": 0, "seed": 0, "data": data, "base": BASE, "out": out,
    }  # fmt: skip
    with redirect_stdout(StringIO()) as said:
        print(modules.embed_data.prepare(Namespace(**{**usual, **more})))
    return json.loads((out / "manifest.json").read_text()), said.getvalue()


@pytest.fixture(scope="module")
def rows(modules: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("embed") / "rows"
    manifest, _ = prepared(modules, QUESTIONS, out, eval_fraction=0.25, global_batch=BATCH)
    assert manifest["columns"] == ["anchor", "positive", "negative"]
    assert min(manifest["examples"].values()) > 30
    return out


def training(rows: Path, base: Path, out: Path, *more: object) -> list[str]:
    return program(
        "embed_train.py", "--data", rows, "--base", base, "--out", out / "weights", "--history", out / "history.jsonl",
        "--checkpoints", out / "checkpoints", "--max-steps", STEPS, "--global-batch", BATCH, "--micro-batch", BATCH, "--save-every", 6,
        "--learning-rate", RATE, "--warmup-steps", 0, "--eval-every", 12, "--matryoshka", *DIMENSIONS, *more,
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


def pairs(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"anchor": f"a {n}", "positive": f"p {n}", **more} for n in range(count)]


REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "no positive": ([{"anchor": "a", "text": "b"}], {}, r'd.jsonl:1: no column "positive"; it has: anchor, text'),
    "an empty text": ([{"anchor": " ", "positive": "b"}], {}, r'd.jsonl:1: "anchor" is empty'),
    "an empty positive": ([{"anchor": "a", "positive": ""}], {}, r'd.jsonl:1: "positive" is empty'),
    "null": ([{"anchor": "a", "positive": None}], {}, r'd.jsonl:1: "positive" is null, a string'),
    "a list of positives": ([{"anchor": "a", "positive": ["b", "c"]}], {}, r'"positive" is a list: write a row for each text'),
    "a list of negatives": (pairs(2, negative=["b", "c"]), {}, r'"negative" is a list: write a row for each text'),
    "a negative that is the positive": ([{"anchor": "a", "positive": "b", "negative": "b"}], {}, '"negative" is the same text as "positive"'),
    "a negative that is the anchor": ([{"anchor": "a", "positive": "b", "negative": "a"}], {}, '"negative" is the same text as "anchor"'),
    "a pair that is no match": ([*pairs(1, label=1), {"anchor": "a", "positive": "b", "label": 0}], {}, 'd.jsonl:2: "label" is 0: the texts do not match'),
    "degrees of likeness": (pairs(2, score=0.8), {}, '"score" is 0.8: each row is learned as a match, and degrees'),
    "classes of likeness": (pairs(2, label="neutral"), {}, '"label" is neutral: each row is learned as a match'),
    "negatives of some rows": ([*pairs(2, negative="n"), {"anchor": "x", "positive": "y"}], {}, '1 of 3 rows have no "negative"'),
    "triplet loss of pairs": (pairs(2), {"loss": "triplet"}, 'loss=triplet needs a "negative" in each row'),
    "a batch of one text": ([{"anchor": f"a {n}", "positive": "p"} for n in range(9)], {}, r"rows that share no text, of which there are 1 to learn from: .*say global_batch=1"),
    "dimensions beyond the base": (pairs(2), {"matryoshka": [128, 64]}, "matryoshka: 128 is more than the 64 numbers"),
    "too long for the base": (pairs(2), {"max_length": 100_000}, r"more than the \d+ tokens that the base model takes: say max_length="),
    "no dimension": (pairs(2), {"matryoshka": [64, 0]}, "matryoshka: 0 is no number of dimensions"),
    "a dimension twice": (pairs(2), {"matryoshka": [64, 64]}, "matryoshka: 64 is there twice"),
    "one column for two": (pairs(2), {"columns": '{"anchor": "positive"}'}, "are the same column: positive, positive, negative"),
    "a prompt that is no text": (pairs(2), {"prompts": '{"query": 5}'}, 'prompts: {"query": 5} is not {"query": "TEXT"'),
    "another name for a prompt": (pairs(2), {"prompts": '{"passage": "x"}'}, "passage is none of query, document"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_teach_something_else_are_refused(
    name: str, modules: Namespace, tmp_path: Path
) -> None:
    data, more, said = REFUSED[name]
    with pytest.raises(modules.embed_data.BadData, match=said):
        prepared(modules, table(tmp_path, *data), tmp_path / "out", **more)


def test_what_is_cut_or_learned_in_vain_is_a_warning(modules: Namespace, tmp_path: Path) -> None:
    data = [
        {"anchor": "a", "positive": "b", "negative": "n"},
        {"anchor": "a", "positive": "c", "negative": "b"},
        {"anchor": "same", "positive": "same", "negative": "m"},
        {"anchor": "long " * 200, "positive": "d", "negative": "o"},
    ]
    _, said = prepared(modules, table(tmp_path, *data), tmp_path / "out", matryoshka=[32])
    assert "1 rows truncated at 96 tokens (25.0%): raise max_length" in said
    assert "1 rows have a negative that is a positive of the same anchor in another row" in said
    assert "1 rows have the same text as anchor and positive" in said
    assert "matryoshka does not name 64, the base's own dimension" in said
    assert "a batch of 2 rows has few negatives" in said


def test_columns_that_nothing_is_learned_from_are_named(modules: Namespace, tmp_path: Path) -> None:
    data = table(tmp_path, *pairs(3, id=7, hard_negative="n", label=1))
    _, said = prepared(modules, data, tmp_path / "a")
    assert "columns that are not read: id, hard_negative; for negatives say columns='{negative: hard_negative}'" in said  # fmt: skip
    columns = '{"negative": "hard_negative"}'
    manifest, said = prepared(modules, data, tmp_path / "b", columns=columns, global_batch=1)
    assert len(manifest["columns"]) == 3 and "not read: id\n" in said


def test_the_rows_that_ship_are_what_their_program_makes() -> None:
    spec = importlib.util.spec_from_file_location(
        "questions", QUESTIONS.parents[1] / "make_questions.py"
    )
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.rows() == [json.loads(line) for line in QUESTIONS.read_text().splitlines()]


def test_rows_are_the_same_in_every_format(modules: Namespace, tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    data = [*pairs(3, label=1), {"anchor": "é, \"q\"\n", "positive": "b", "label": 1}]  # fmt: skip
    table(tmp_path, *data)
    (tmp_path / "d.json").write_text(json.dumps(data))
    parquet.write_table(arrow.Table.from_pylist(data), tmp_path / "d.parquet")
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*data[0], "negative"])
        writer.writeheader()
        writer.writerows(data)
    found = [
        prepared(modules, tmp_path / name, tmp_path / f"out-{name}")[0]["arrays"]
        for name in ("d.jsonl", "d.json", "d.csv", "d.parquet")
    ]
    assert found[1:] == found[:-1]


def test_files_that_are_named_as_rows_to_judge_by_are_held_out(
    modules: Namespace, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    table(folder, *pairs(4), name="train.jsonl")
    table(folder, *pairs(5)[3:], name="test.jsonl")
    manifest, said = prepared(modules, folder, tmp_path / "out", eval_fraction=0.5)
    assert manifest["examples"] == {"train": 3, "held_out": 2}
    assert "held out, by its name: test.jsonl" in said and "1 rows to learn from left out" in said


def test_no_anchor_is_learned_and_held_out(modules: Namespace, tmp_path: Path) -> None:
    data = [{"anchor": f"a {n % 10}", "positive": f"p {n}"} for n in range(60)]
    prepared(modules, table(tmp_path, *data), tmp_path / "out", eval_fraction=0.3)
    split = modules.splits.Splits(tmp_path / "out")
    learned, held_out = set(split.train["anchor"]), set(split.held_out["anchor"])
    assert held_out and not learned & held_out and len(learned | held_out) == 10


# -- the base ---------------------------------------------------------------------------------------------------------------------------------------------


def test_texts_are_read_as_they_are_and_not_in_a_chat_template(modules: Namespace) -> None:
    """The tiny base has one, and sentence-transformers would put each text into it."""
    from transformers import AutoTokenizer

    model = drawn(modules, prompts={"query": "query: ", "document": ""})
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    assert tokenizer.chat_template and not model.tokenizer.chat_template
    found = model.preprocess(["hello"], prompt="query: ")["input_ids"].tolist()
    assert found == [tokenizer("query: hello")["input_ids"]]


def test_a_model_that_reads_forwards_only_is_pooled_at_its_last_token_and_others_by_the_mean(
    modules: Namespace,
) -> None:
    pooled_by = modules.embed_model.pooled_by
    assert [pooled_by(name) for name in ("llama", "qwen3", "gpt2")] == ["lasttoken"] * 3
    assert [pooled_by(name) for name in ("bert", "xlm-roberta", "modernbert", "mpnet", "t5")] == ["mean"] * 5  # fmt: skip
    assert drawn(modules)[1].pooling_mode == "lasttoken"


def test_a_base_of_sentence_transformers_keeps_its_pooling_and_prompts(
    modules: Namespace, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    own = {"query": "q: ", "document": "d: "}
    drawn(modules, pooling="cls", prompts=own).save_pretrained(str(base))
    data = table(tmp_path, *pairs(2))
    manifest, _ = prepared(modules, data, tmp_path / "a", base=base)
    assert manifest["prompts"] == own
    settings = {"prompts": own, "max_length": 32, "pooling": "auto"}
    assert modules.embed_model.load(base, "pretrained", 0, "no", **settings)[1].pooling_mode == "cls"  # fmt: skip
    other, said = prepared(modules, data, tmp_path / "b", base=base, prompts='{"query": ""}')
    assert other["prompts"] == {"query": "", "document": "d: "} and "replace the base's own" in said
    with pytest.raises(modules.embed_data.BadData, match="pooling=mean, and the base was trained"):
        prepared(modules, data, tmp_path / "c", base=base, pooling="mean")


# -- training -------------------------------------------------------------------------------------------------------------------------------------------


def test_no_batch_has_a_text_twice_and_a_longer_training_begins_as_a_shorter_one(
    modules: Namespace, tmp_path: Path
) -> None:
    data = [{"anchor": f"a {n}", "positive": f"p {n % 12}"} for n in range(60)]
    prepared(modules, table(tmp_path, *data), tmp_path / "out", global_batch=8)
    learned = modules.splits.Splits(tmp_path / "out").train

    def read(steps: int) -> list[str]:
        options = Namespace(seed=3, max_steps=steps, global_batch=8)
        return [text for row in modules.embed_train._without_twins(learned, options) for text in row.values()]  # fmt: skip

    long = read(20)
    batches = [long[at : at + 16] for at in range(0, len(long), 16)]
    assert len(batches) == 20 and all(len(set(batch)) == 16 for batch in batches)
    assert read(9) == long[: 9 * 16]


def test_losses_are_those_of_the_plain_script(
    trained: Path, rows: Path, base: Path, modules: Namespace, tmp_path: Path
) -> None:
    """sentence-transformers' own trainer on the same texts in the same order, with nothing of ours."""
    from datasets import Dataset
    from sentence_transformers import (  # fmt: skip
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.sentence_transformer import losses
    from torch.utils.data import BatchSampler, SequentialSampler

    options = Namespace(seed=0, max_steps=STEPS, global_batch=BATCH)
    order = modules.embed_train._without_twins(modules.splits.Splits(rows).train, options)
    texts = {row["anchor"]: row for row in map(json.loads, QUESTIONS.read_text().splitlines())}
    model = SentenceTransformer(str(base), device="cpu")
    plain = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, lr_scheduler_type="constant",
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
            batch_sampler=lambda data, batch_size, drop_last, **_: BatchSampler(SequentialSampler(data), batch_size, drop_last),
        ),
        train_dataset=Dataset.from_list([texts[row["anchor"]] for row in order]),
        loss=losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), DIMENSIONS),
    )  # fmt: skip
    plain.train()
    theirs = [told["loss"] for told in plain.state.log_history if "loss" in told]
    ours = [told["loss"] for told in history(trained)]
    assert len(ours) == STEPS and ours == pytest.approx(theirs, abs=1e-5)
    assert ours[-1] < ours[0] / 2


def test_a_smaller_micro_batch_keeps_all_negatives(
    trained: Path, rows: Path, base: Path, tmp_path: Path
) -> None:
    """Gradients added up over parts of a batch would compare each text with those of its part only."""
    done = run(training(rows, base, tmp_path, "--micro-batch", 4, "--max-steps", 3, "--eval-every", 0))  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = [told["loss"] for told in history(tmp_path)]
    assert ours == pytest.approx([told["loss"] for told in history(trained)[:3]], abs=1e-4)


@pytest.mark.slow
def test_two_processes_share_a_batch_and_all_of_its_negatives(
    trained: Path, rows: Path, base: Path, tmp_path: Path
) -> None:
    more = ("--max-steps", 3, "--eval-every", 0, "--micro-batch", 4)
    done = run(launched(training(rows, base, tmp_path, *more), 2))
    assert done.returncode == 0, done.stderr
    ours = [told["loss"] for told in history(tmp_path)]
    assert ours == pytest.approx([told["loss"] for told in history(trained)[:3]], abs=1e-3)


def test_a_training_that_is_killed_at_any_step_ends_in_the_same_bits(
    trained: Path, rows: Path, base: Path, tmp_path: Path
) -> None:
    step = random.randrange(7, STEPS)
    signal_at(f"step {step}/", training(rows, base, tmp_path), signal.SIGKILL, tmp_path / "gate")
    latest = max(
        (tmp_path / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name[11:])
    )
    done = run(training(rows, base, tmp_path, "--resume", latest))
    assert done.returncode == 0, done.stderr
    for name in ("history.jsonl", "weights/model.safetensors", "weights/config_sentence_transformers.json"):  # fmt: skip
        assert (tmp_path / name).read_bytes() == (trained / name).read_bytes(), f"killed at {step}"


def test_it_beats_the_untrained_base_on_rows_that_it_never_saw_with_every_seed(
    trained: Path, rows: Path, base: Path, tmp_path: Path
) -> None:
    for seed in range(3):
        out = trained if seed == 0 else tmp_path / str(seed)
        if seed:
            done = run(training(rows, base, out, "--seed", seed))
            assert done.returncode == 0, done.stderr
        report = tmp_path / f"report-{seed}"
        done = run(
            program(
                "embed_evaluate.py", "--data", rows, "--base", base, "--model", out / "weights", "--report", report,
                "--micro-batch", 16,
            )
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads((report / "report.json").read_text())
        assert found["documents"] > found["queries"] == 37
        assert set(found["dimensions"]) == {"64", "32"}
        for size in found["dimensions"].values():
            assert size["after"]["ndcg"] > size["before"]["ndcg"] + 0.15, found["dimensions"]
        learned = found["ndcg"] > found["before"]["ndcg"] + 37**-0.5
        said = "It learned to find documents" if learned else "Nothing can be concluded"
        assert said in (report / "report.md").read_text()


def test_what_comes_out_is_loaded_with_all_that_it_was_trained_with(trained: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(trained / "weights"), device="cpu")
    assert model.max_seq_length == 96 and model[1].pooling_mode == "mean"
    assert model.encode("a text", truncate_dim=32).shape == (32,)
    assert not list(trained.rglob("README.md"))


def test_triplets_have_a_loss_of_their_own_and_warnings_of_the_library_reach_the_user(
    rows: Path, base: Path, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    more = ("--loss", "triplet", "--max-steps", 2, "--micro-batch", 4, "--eval-every", 0, "--matryoshka", 32)  # fmt: skip
    done = run(training(rows, base, tmp_path, *more), RECIPE_METRICS=str(metrics))
    assert done.returncode == 0, done.stderr
    assert all(0 < told["loss"] < 1 for told in history(tmp_path))
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert any("embedding dimension 64 is not included" in line.get("warning", "") for line in told)


def test_an_encoder_without_modules_of_its_own_gets_them(
    modules: Namespace, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, PreTrainedTokenizerFast

    base = tmp_path / "base"
    words = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *(f"w{n}" for n in range(30))])}
    backend = Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(base)  # fmt: skip
    BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=32
    ).save_pretrained(base)  # fmt: skip
    data = [{"anchor": f"w{n}", "positive": f"w{n + 15}"} for n in range(15)]
    prepared(modules, table(tmp_path, *data), tmp_path / "rows", base=base, max_length=16)
    done = run(
        training(tmp_path / "rows", base, tmp_path, "--init", "random", "--max-steps", 2, "--global-batch", 4, "--micro-batch", 2,
                 "--matryoshka", "--checkpoint-activations")
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "weights" / "1_Pooling" / "config.json").read_text())
    assert made["pooling_mode"] == "mean" and made["embedding_dimension"] == 16


@pytest.mark.slow
def test_the_whole_recipe_learns_and_describes_what_it_made(tmp_path: Path) -> None:
    results = smoke("embed@1", tmp_path)
    report = json.loads((results / "report" / "report.json").read_text())
    # Of 37 queries, when this was written: NDCG@10 0.7, 0.1 before.
    assert report["ndcg"] > report["before"]["ndcg"] + 0.3
    card = (results / "model" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card and "sentence-similarity" in card
