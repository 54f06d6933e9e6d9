"""Claims about a data set that is read while training: the same sequences as from tokens, from any place on; what resumes, what is refused."""

from __future__ import annotations

import csv
import importlib
import json
import random
import signal
from argparse import Namespace
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.library.siblings import siblings
from tests.library.test_text_train import QUESTIONS, TOPICS, prepare, training, weights
from tests.system.test_sft_trainer import BASE, checkpoints, run, signal_at

pytestmark = pytest.mark.xdist_group("text")
LENGTH = 64


@pytest.fixture
def modules() -> Iterator[Namespace]:
    with siblings():
        yield Namespace(
            **{
                name: importlib.import_module(name)
                for name in ("sft_data", "stream_data", "tokens", "rows")
            }
        )


def prepared(modules: Namespace, data: Path, out: Path, **more: Any) -> Path:
    out.mkdir()
    usual = {"format": "auto", "columns": "{}", "chat_template": None, "eos_token": None, "max_length": LENGTH, "packing": "true", "eval_fraction": 0.2,
             "max_bad_rows": 0, "seed": 3, "streaming": True, "shuffle_rows": 7, "data": data, "base": BASE, "out": out}  # fmt: skip
    modules.sft_data.prepare(Namespace(**{**usual, **more}))
    return out


def opened(modules: Namespace, data: Path, out: Path, allowed: int = 0) -> Any:
    return modules.stream_data.Stream(data, out, BASE, allowed)


def plain(documents: Any) -> list[tuple[list[int], list[int]]]:
    return [(ids.tolist(), learned.tolist()) for ids, learned in documents]


def written(suffix: str, folder: Path, count: int = 60) -> Path:
    """Rows of one text each in two files of a format, some of them beyond a sequence."""
    texts = [
        f"{number} is a number\nthat has {number % 7} beyond sevens. " * (1 + number % 5)
        for number in range(count)
    ]
    folder.mkdir()
    for name, part in (("a", texts[: count // 3]), ("b", texts[count // 3 :])):
        file = folder / f"{name}{suffix}"
        if suffix == ".jsonl":
            file.write_text(
                "\ufeff" + "\n".join(json.dumps({"text": text}) + "\n" for text in part), "utf-8"
            )  # with empty lines between them
        elif suffix == ".csv":
            with file.open("w", newline="") as table:
                csv.writer(table).writerows([["text"], *([text] for text in part)])
        elif suffix == ".txt":
            file.write_text("".join(part))
        else:
            arrow, parquet = (
                importlib.import_module("pyarrow"),
                importlib.import_module("pyarrow.parquet"),
            )
            parquet.write_table(arrow.table({"text": part}), file, row_group_size=6)
    return folder


def test_data_that_fits_into_a_block_is_what_a_training_from_tokens_reads(
    modules: Namespace, tmp_path: Path
) -> None:
    """Two readings and a bit of it: the same documents in the same sequences in the same order, and the same rows held out."""
    data = written(".jsonl", tmp_path / "data")
    stored, out = (
        prepared(modules, data, tmp_path / "stored", streaming=False),
        prepared(modules, data, tmp_path / "out", shuffle_rows=10_000),
    )
    tokens, stream = modules.tokens.Tokens(stored, "train"), opened(modules, data, out)
    assert json.loads((out / "manifest.json").read_text())["sequences"]["train"] == 0
    for place, number in enumerate(modules.tokens.order(len(tokens), 3, 0, 5 * len(tokens) // 2)):
        assert plain(stream.documents(place)) == plain(tokens.documents(number))
    held = [modules.tokens.Tokens(folder, "held_out") for folder in (stored, out)]
    assert len(held[0]) == len(held[1]) > 0
    assert all(
        plain(held[0].documents(number)) == plain(held[1].documents(number))
        for number in range(len(held[0]))
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".txt", ".parquet"])
@pytest.mark.parametrize("shuffle", [0, 7])
def test_a_stream_goes_on_from_any_place_as_if_it_had_not_stopped(
    suffix: str, shuffle: int, modules: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.rows, "BLOCK", 150)
    monkeypatch.setattr(modules.stream_data, "UNSHUFFLED", 5)
    data = written(suffix, tmp_path / "data")
    out = prepared(modules, data, tmp_path / "out", shuffle_rows=shuffle)
    whole = opened(modules, data, out)
    found = [plain(whole.documents(number)) for number in range(60)]
    again = opened(modules, data, out)
    for number in range(60):
        again.documents(number)
        place = json.loads(json.dumps(again.place(number)))
        resumed = opened(modules, data, out)
        resumed.begin(place)
        assert [
            plain(resumed.documents(later)) for later in range(number, min(number + 9, 60))
        ] == found[number : number + 9]
    assert place["number"] > 1


def test_a_reading_has_each_row_once_and_no_row_that_is_held_out(
    modules: Namespace, tmp_path: Path
) -> None:
    data = written(".jsonl", tmp_path / "data")
    stored, out = (
        prepared(modules, data, tmp_path / "stored", streaming=False),
        prepared(modules, data, tmp_path / "out"),
    )
    tokens, stream = modules.tokens.Tokens(stored, "train"), opened(modules, data, out)
    wanted = sorted(
        chain.from_iterable(plain(tokens.documents(number)) for number in range(len(tokens)))
    )
    read: list[Any] = []
    number = 0
    while len(read) < 2 * len(wanted):
        read += plain(stream.documents(number))
        number += 1
    first, second = read[: len(wanted)], read[len(wanted) :]
    assert sorted(first) == sorted(second) == wanted and first != second


def test_a_row_that_is_bad_far_down_is_named_and_may_be_left_out(
    modules: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.sft_data, "HEAD", 10)
    monkeypatch.setattr(modules.sft_data, "BATCH", 5)
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"text": f"row {number} of these"}) + "\n" for number in range(40))
        + '{"text": 7}\n'
    )
    out = prepared(modules, file, tmp_path / "out")
    assert json.loads((out / "manifest.json").read_text())["rows"] == 10
    with pytest.raises(
        modules.rows.BadData,
        match=r'1 bad rows beside 40 .* max_bad_rows is 0\n  rows.jsonl:41: "text" is a number',
    ):
        [opened(modules, file, out).documents(number) for number in range(40)]
    stream = opened(modules, file, out, allowed=1)
    assert [
        len(stream.documents(number)) for number in range(40)
    ]  # three readings: of each it is one


def test_a_template_and_tools_are_read_as_before_training(
    modules: Namespace, tmp_path: Path
) -> None:
    """Conversations, of which the answers are learned; their chat template goes with the tokens."""
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    stored = prepared(
        modules, QUESTIONS, tmp_path / "stored", streaming=False, chat_template=template
    )
    out = prepared(
        modules, QUESTIONS, tmp_path / "out", chat_template=template, shuffle_rows=10_000
    )
    template.unlink()
    tokens, stream = modules.tokens.Tokens(stored, "train"), opened(modules, QUESTIONS, out)
    order = modules.tokens.order(len(tokens), 3, 0, len(tokens))
    assert all(
        plain(stream.documents(place)) == plain(tokens.documents(number))
        for place, number in enumerate(order)
    )


def test_epochs_of_a_stream_are_refused(tmp_path: Path) -> None:
    prepare(TOPICS, tmp_path / "tokens", "--streaming", "--shuffle-rows", 100)
    done = run(training(tmp_path / "tokens", tmp_path, "--stream", TOPICS, "--epochs", 2))
    assert (
        done.returncode == 1
        and "train: epochs 0 is what streaming takes" in done.stderr
        and "say max_steps" in done.stderr
    )


def test_a_training_from_a_stream_learns_the_bits_of_one_from_tokens(tmp_path: Path) -> None:
    for name, more in (("stored", ()), ("streamed", ("--streaming", "--shuffle-rows", 10_000))):
        prepare(TOPICS, tmp_path / name / "tokens", *more)
        flags = ("--stream", TOPICS) if more else ()
        done = run(training(tmp_path / name / "tokens", tmp_path / name, *flags, max_steps=2))
        assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "stored") == weights(tmp_path / "streamed")


@pytest.mark.proof
@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_training_from_a_stream_ends_in_the_same_bits(
    processes: int, tmp_path: Path
) -> None:
    """Killed at any step, in any of many blocks; two processes learn the very bits that one learns undisturbed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    prepare(TOPICS, tmp_path / "tokens", "--streaming", "--shuffle-rows", 40)
    flags = ("--stream", TOPICS, "--train-embeddings", "--decay-steps", 0, "--save-every", 3)
    done = run(training(tmp_path / "tokens", whole, *flags, max_steps=30))
    assert done.returncode == 0, done.stderr
    at = random.randrange(4, 30)
    signal_at(f"step {at}/30", training(tmp_path / "tokens", killed, *flags, processes=processes, max_steps=30), signal.SIGKILL, tmp_path / "gate",
              RECIPE_WORLD_SIZE=str(processes))  # fmt: skip
    saved = checkpoints(killed)[-1]
    assert json.loads((saved / "stream.json").read_text())["number"] > 0, at
    done = run(
        training(
            tmp_path / "tokens",
            killed,
            *flags,
            "--resume",
            saved,
            processes=processes,
            max_steps=30,
        ),
        RECIPE_WORLD_SIZE=str(processes),
    )
    assert "resumed at step" in done.stdout and done.returncode == 0, done.stderr
    assert weights(killed) == weights(whole), at
    assert (killed / "history.jsonl").read_bytes() == (whole / "history.jsonl").read_bytes()


@pytest.mark.proof
def test_the_loss_is_that_of_a_training_from_tokens(tmp_path: Path) -> None:
    """Of rows in any order, in blocks of 200 of the 245: the mean of the last 20 of 60 steps is within 1 %, and far below that of the first step."""
    losses, lines = {}, TOPICS.read_text().splitlines(keepends=True)
    random.Random(0).shuffle(lines)
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    for name, more in (("stored", ()), ("streamed", ("--streaming", "--shuffle-rows", 200))):
        prepare(tmp_path / "rows.jsonl", tmp_path / name / "tokens", *more)
        flags = (
            "--train-embeddings",
            "--decay-steps",
            0,
            *(("--stream", tmp_path / "rows.jsonl") if more else ()),
        )
        done = run(training(tmp_path / name / "tokens", tmp_path / name, *flags, max_steps=60))
        assert done.returncode == 0, done.stderr
        losses[name] = [
            json.loads(line)["loss"]
            for line in (tmp_path / name / "history.jsonl").read_text().splitlines()
        ]
    stored, streamed = losses.values()
    assert mean(streamed[-20:]) == pytest.approx(mean(stored[-20:]), rel=0.01)
    assert mean(streamed[-20:]) < streamed[0] - 2
