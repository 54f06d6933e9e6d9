"""Claims about step `data` of dpo, orpo and reward: which rows are pairs, what is said of those that are not, what tokens come of them."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.library.siblings import siblings
from tests.system.test_sft_trainer import BASE, ROOT, program, run

PAIRS = ROOT / "fixtures" / "datasets" / "explain-or-show" / "pairs.jsonl"
GOOD = {"prompt": "Which is even?\n", "chosen": "Two is.", "rejected": "Three is."}
ASKED = [{"role": "user", "content": "Which is even?"}]
TWO, THREE = (
    {"role": "assistant", "content": "Two is."},
    {"role": "assistant", "content": "Three is."},
)


@pytest.fixture
def data() -> Iterator[Any]:
    """The program as a module, with its siblings."""
    with siblings():
        import preference_data  # type: ignore[import-not-found]

        yield preference_data


def made(
    data: Any, source: Path, out: Path, **more: Any
) -> tuple[dict[str, list[dict[str, list[int]]]], dict[str, Any], str]:
    """The rows of both splits, the manifest, and what was said."""
    import pyarrow as arrow  # type: ignore[import-untyped]

    options = {
        "data": source,
        "base": BASE,
        "out": out,
        "columns": "{}",
        "chat_template": None,
        "eos_token": None,
        "max_length": 128,
    }
    with redirect_stdout(StringIO()) as printed:
        summary = data.prepare(
            SimpleNamespace(
                **{**options, "eval_fraction": 0.0, "max_bad_rows": 0, "seed": 0, **more}
            )
        )
    splits = {
        name: arrow.ipc.open_stream(out / f"{name}.arrow").read_all().to_pylist()
        for name in ("train", "held_out")
    }
    return splits, json.loads((out / "manifest.json").read_text()), printed.getvalue() + summary


def rows(file: Path, *values: object) -> Path:
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def text(ids: list[int]) -> str:
    from tokenizers import Tokenizer

    return str(
        Tokenizer.from_file(str(BASE / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    )


def test_an_answer_follows_its_prompt_and_ends(data: Any, tmp_path: Path) -> None:
    splits, manifest, _ = made(data, rows(tmp_path / "a.jsonl", GOOD), tmp_path / "out")
    (row,) = splits["train"]
    assert text(row["prompt_ids"]) == GOOD["prompt"]
    assert (
        text(row["chosen_ids"]) == "Two is.<|endoftext|>"
        and text(row["rejected_ids"]) == "Three is.<|endoftext|>"
    )
    assert manifest["pairs"] == {"train": 1, "held_out": 0} and manifest["forms"] == ["plain text"]
    assert manifest["end_token"]["text"] == "<|endoftext|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [TWO], "rejected": [THREE]},
        {
            "prompt": "Which is even?",
            "chosen": [*ASKED, TWO],
            "rejected": [*ASKED, THREE],
        },  # as UltraFeedback has it
        {"chosen": [*ASKED, TWO], "rejected": [*ASKED, THREE]},  # as HH has it, once it is messages
        {"prompt": ASKED, "chosen": "Two is.", "rejected": "Three is."},
        {
            "prompt": json.dumps(ASKED),
            "chosen": json.dumps([TWO]),
            "rejected": json.dumps([THREE]),
        },  # as CSV has it
    ],
)
def test_conversations_are_read_in_every_form_they_are_published_in(
    row: object, data: Any, tmp_path: Path
) -> None:
    splits, manifest, _ = made(data, rows(tmp_path / "a.jsonl", row), tmp_path / "out")
    (found,) = splits["train"]
    assert (
        text(found["prompt_ids"])
        == "<|im_start|>user\nWhich is even?<|im_end|>\n<|im_start|>assistant\n"
    )
    # What the template writes is all there is: no second beginning, no second end.
    assert (
        text(found["chosen_ids"]) == "Two is.<|im_end|>\n"
        and text(found["rejected_ids"]) == "Three is.<|im_end|>\n"
    )
    assert manifest["forms"] == ["conversations"] and manifest["end_token"]["text"] == "<|im_end|>"


def test_csv_and_parquet_and_other_names_of_columns_are_read(data: Any, tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    source = tmp_path / "set"
    source.mkdir()
    named = {"question": GOOD["prompt"], "better": GOOD["chosen"], "worse": GOOD["rejected"]}
    with (source / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(named))
        writer.writeheader()
        writer.writerow(named)
    parquet.write_table(
        arrow.Table.from_pylist([{**named, "better": "2 is."}]), source / "b.parquet"
    )
    columns = json.dumps({"prompt": "question", "chosen": "better", "rejected": "worse"})
    splits, manifest, _ = made(data, source, tmp_path / "out", columns=columns)
    assert [text(row["chosen_ids"]) for row in splits["train"]] == [
        "Two is.<|endoftext|>",
        "2 is.<|endoftext|>",
    ]
    assert manifest["files"] == ["a.csv", "b.parquet"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, 'no column "rejected"; it has: prompt, chosen'),
        (
            {"chosen": "b", "rejected": "c"},
            'no column "prompt"; it has: chosen, rejected; only whole conversations can do without',
        ),
        (
            {**GOOD, "rejected": GOOD["chosen"]},
            '"chosen" and "rejected" are equal: nothing is preferred',
        ),
        ({**GOOD, "chosen": " "}, '"chosen" is empty'),
        ({**GOOD, "chosen": 3}, '"chosen" is a number, a string or a list of messages is expected'),
        ({**GOOD, "prompt": None}, '"prompt" is null, a string or a list of messages is expected'),
        (
            {**GOOD, "chosen": [{"role": "assistant"}]},
            '"chosen" has a message 1 that is not {"role": "…", "content": "…"}: it has no "content"',
        ),
        (
            {"prompt": ASKED, "chosen": [TWO], "rejected": [*ASKED]},
            '"rejected" does not end with a message of the assistant',
        ),
        ({**GOOD, "chosen": "\ud800"}, "the text holds half a surrogate pair"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    bad: object, why: str, data: Any, tmp_path: Path
) -> None:
    source = rows(tmp_path / "a.jsonl", GOOD, bad)
    with pytest.raises(
        Exception, match="1 bad rows beside 1 good ones; max_bad_rows=1 would leave them out"
    ) as refused:
        made(data, source, tmp_path / "out")
    assert f"a.jsonl:2: {why}" in str(refused.value)
    _, manifest, said = made(data, source, tmp_path / "out", max_bad_rows=1)
    assert manifest["bad_rows"] == 1 and "1 bad rows left out" in said and why in said


def test_the_program_ends_with_one_message(tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b"})
    done = run(
        program(
            "preference_data.py",
            "--data",
            source,
            "--base",
            BASE,
            "--out",
            tmp_path / "out",
            "--max-length",
            64,
        )
    )
    assert done.returncode == 1
    assert (
        done.stderr
        == 'data: 1 bad rows beside 0 good ones\n  a.jsonl:1: no column "rejected"; it has: prompt, chosen\n'
    )


def test_what_is_cut_off_is_reported_and_pairs_that_are_then_equal_are_left_out(
    data: Any, tmp_path: Path
) -> None:
    long = "Two is even and three is not, which is all there is to say. " * 4
    source = rows(
        tmp_path / "a.jsonl",
        GOOD,
        {**GOOD, "chosen": long},
        {**GOOD, "chosen": long, "rejected": long + "More."},
        {**GOOD, "prompt": long},
    )
    splits, manifest, said = made(data, source, tmp_path / "out", max_length=32)
    assert [len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in splits["train"]][1] == 32
    assert (
        manifest["pairs"]["train"],
        manifest["truncated_rows"],
        manifest["rows_equal_once_cut"],
        manifest["rows_with_no_room"],
    ) == (2, 2, 1, 1)
    assert "2 rows truncated at 32 tokens (50.0%)" in said
    assert (
        "1 rows left out: the prompt alone fills max_length" in said
        and "1 rows left out: cut at max_length, both answers are the same" in said
    )


def test_rows_of_one_prompt_are_held_out_together_and_more_data_moves_none_across(
    data: Any, tmp_path: Path
) -> None:
    splits, manifest, _ = made(data, PAIRS, tmp_path / "all", eval_fraction=0.25)
    prompts = {name: {tuple(row["prompt_ids"]) for row in part} for name, part in splits.items()}
    assert not prompts["train"] & prompts["held_out"]
    assert len(prompts["held_out"]) == manifest["prompts_held_out"] >= 4
    half = tmp_path / "half.jsonl"
    half.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:120]))
    fewer, _, _ = made(data, half, tmp_path / "half", eval_fraction=0.25)
    assert {tuple(row["prompt_ids"]) for row in fewer["held_out"]} <= prompts["held_out"]
    other, _, _ = made(data, PAIRS, tmp_path / "other", eval_fraction=0.25, seed=1)
    assert {tuple(row["prompt_ids"]) for row in other["held_out"]} != prompts["held_out"]


def test_a_beginning_of_text_is_never_doubled(data: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text((BASE / "config.json").read_text())
    settings = json.loads((BASE / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(
        json.dumps({**settings, "bos_token": "<|im_start|>"})
    )
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(base / "tokenizer.json"))
    source = rows(
        tmp_path / "a.jsonl",
        GOOD,
        {**GOOD, "prompt": "<|im_start|>" + GOOD["prompt"]},
        {"prompt": ASKED, "chosen": [TWO], "rejected": [THREE]},
    )
    splits, _, _ = made(data, source, tmp_path / "out", base=base)
    begun = [row["prompt_ids"] for row in splits["train"]]
    assert begun[0] == begun[1]
    assert all(ids[0] == 1 and ids[1] != 1 for ids in begun)
    assert all(
        1 not in row[name] for row in splits["train"] for name in ("chosen_ids", "rejected_ids")
    )


@pytest.mark.skipif(
    platform.python_version() != "3.11.7",
    reason="another Python than 3.11.7 reads the reference differently",
)
def test_the_fixture_is_what_its_script_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PAIRS.parents[1]))
    import make_explain_or_show  # type: ignore[import-not-found]

    monkeypatch.setattr(make_explain_or_show, "HERE", tmp_path)
    make_explain_or_show.main()
    assert (tmp_path / "pairs.jsonl").read_bytes() == PAIRS.read_bytes()
    assert (PAIRS.parent / "LICENSE").read_text().startswith("A. HISTORY OF THE SOFTWARE")
