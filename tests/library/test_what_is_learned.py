"""Claims about what a text recipe learns of the data that people have: whatever its format, its base's files and its folder look like.

The ids are judged by transformers' AutoTokenizer, packing by the model itself.  The rows of the table in docs/sft.md, "What is read, what is learned",
are TABLE here.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.library.siblings import TRAINERS, siblings
from tests.library.test_text_train import training
from tests.system.test_sft_trainer import run

pytestmark = pytest.mark.xdist_group("text")
ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "fixtures" / "tiny-llama"
END = "<|endoftext|>"
TEMPLATE = """{%- for tool in tools or [] %}TOOL {{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}{% for call in message.get('tool_calls', []) %}CALL {{ call['function'] | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADDS_END = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": END, "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
}
ADDS_BOTH = {
    **ADDS_END,
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, *ADDS_END["single"]],  # type: ignore[misc]
    "special_tokens": {
        **ADDS_END["special_tokens"],  # type: ignore[dict-item]
        "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]},
    },
}
SAVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncation": {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    },
    "padding": {
        "padding": {
            "strategy": "BatchLongest",
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": END,
        }
    },
    "end added": {"post_processor": ADDS_END},
    "begin and end added": {"post_processor": ADDS_BOTH},
}
"""What `save_pretrained` may leave in a tokenizer.json."""


@pytest.fixture(scope="module")
def modules() -> Iterator[Namespace]:
    names = (
        "sft_data",
        "stream_data",
        "preference_data",
        "rlhf_data",
        "tool_data",
        "tokens",
        "rows",
        "packing",
        "vocabulary",
    )
    with siblings():
        yield Namespace(**{name: importlib.import_module(name) for name in names})


def base_with(folder: Path, saved: Mapping[str, Any], **config: Any) -> Path:
    """The tiny base, with more in its tokenizer.json and its tokenizer_config.json; what is None is taken out."""
    shutil.copytree(BASE, folder)
    for name, more in (("tokenizer.json", saved), ("tokenizer_config.json", config)):
        file = folder / name
        whole = json.loads(file.read_text()) | dict(more)
        file.write_text(
            json.dumps(
                {
                    key: value
                    for key, value in whole.items()
                    if value is not None or name == "tokenizer.json"
                }
            )
        )
    return folder


def jsonl(file: Path, rows: Sequence[object]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def learned(
    modules: Namespace, data: Path, out: Path, **more: Any
) -> tuple[list[tuple[list[int], list[int]]], dict[str, Any], str]:
    """The documents to learn with their marks, in the order of the data; the manifest; and what was said."""
    out.mkdir(parents=True)
    usual = {"format": "auto", "columns": "{}", "chat_template": None, "eos_token": None, "max_length": 256, "packing": "false", "eval_fraction": 0.0,
             "max_bad_rows": 0, "seed": 0, "streaming": False, "shuffle_rows": 0, "data": data, "base": BASE, "out": out}  # fmt: skip
    with redirect_stdout(io.StringIO()) as said:
        print(modules.sft_data.prepare(Namespace(**{**usual, **more})))
    tokens = modules.tokens.Tokens(out, "train")
    documents = [
        (ids.tolist(), marks.tolist())
        for n in range(len(tokens))
        for ids, marks in tokens.documents(n)
    ]
    return documents, json.loads((out / "manifest.json").read_text()), said.getvalue()


def text_of(documents: Sequence[tuple[list[int], list[int]]], *, whole: bool = False) -> list[str]:
    """What is learned of each document, or all that is read of it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    return [
        tokenizer.decode([token for token, mark in zip(*each, strict=True) if mark or whole])
        for each in documents
    ]


# -- F1, F2, F3: what a tokenizer.json carries along ---------------------------------------------------------------------------------------------

TEXTS = [
    "short",
    "a text that is much longer than the cut: " + "one two three " * 6,
    f"it ends itself{END}",
    f"twice{END}{END}",
]


def judged(base: Path, text: str) -> list[int]:
    """The ids by transformers, with the end once."""
    from transformers import AutoTokenizer

    ids = list(AutoTokenizer.from_pretrained(base)(text).input_ids)
    while ids and ids[-1] == 0:
        ids.pop()
    return [*ids, 0]


@pytest.mark.parametrize("saved", SAVED)
def test_texts_are_cut_into_the_tokens_of_transformers_and_end_once(
    saved: str, modules: Namespace, tmp_path: Path
) -> None:
    base = base_with(tmp_path / "base", SAVED[saved])
    data = jsonl(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    found, _, _ = learned(modules, data, tmp_path / "out", base=base)
    assert [ids for ids, _ in found] == [judged(base, text) for text in TEXTS]
    assert all(marks == [0, *[1] * (len(ids) - 1)] for ids, marks in found)


@pytest.mark.parametrize("saved", SAVED)
def test_a_completion_ends_once_and_its_end_is_learned(
    saved: str, modules: Namespace, tmp_path: Path
) -> None:
    base = base_with(tmp_path / "base", SAVED[saved])
    rows = [{"prompt": "Q: ", "completion": text} for text in TEXTS]
    found, _, _ = learned(modules, jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out", base=base)
    assert [ids for ids, _ in found] == [judged(base, "Q: " + text) for text in TEXTS]
    assert all(ids[-1] == 0 and marks[-1] == 1 and ids[-2] != 0 for ids, marks in found)
    if "begin" not in saved:
        assert text_of(found)[0].strip() == f"short{END}"


@pytest.mark.parametrize("saved", SAVED)
def test_a_stream_has_the_tokens_of_a_store(saved: str, modules: Namespace, tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", SAVED[saved])
    data = jsonl(tmp_path / "d.jsonl", [{"prompt": "Q: ", "completion": text} for text in TEXTS])
    stored, _, _ = learned(modules, data, tmp_path / "stored", base=base)
    learned(modules, data, tmp_path / "out", base=base, streaming=True)
    stream = modules.stream_data.Stream(data, tmp_path / "out", base, 0)
    streamed = [
        (ids.tolist(), marks.tolist())
        for n in range(len(TEXTS))
        for ids, marks in stream.documents(n)
    ]
    assert streamed == stored


@pytest.mark.parametrize("saved", SAVED)
def test_both_answers_of_a_pair_end_once_and_the_prompt_does_not(
    saved: str, modules: Namespace, tmp_path: Path
) -> None:
    import pyarrow as arrow  # type: ignore[import-untyped]

    base = base_with(tmp_path / "base", SAVED[saved])
    data = jsonl(
        tmp_path / "d.jsonl", [{"prompt": "Q: ", "chosen": "a good answer", "rejected": "bad"}]
    )
    options = {"data": data, "base": base, "out": tmp_path / "out", "columns": "{}", "chat_template": None, "eos_token": None, "max_length": 256,
               "eval_fraction": 0.0, "max_bad_rows": 0, "seed": 0}  # fmt: skip
    modules.preference_data.prepare(Namespace(**options))
    (row,) = arrow.ipc.open_stream(tmp_path / "out" / "train.arrow").read_all().to_pylist()
    assert row["prompt_ids"] + row["chosen_ids"] == judged(base, "Q: a good answer")
    assert row["prompt_ids"] + row["rejected_ids"] == judged(base, "Q: bad")
    assert 0 not in row["prompt_ids"]


@pytest.mark.parametrize("saved", SAVED)
def test_a_prompt_to_complete_does_not_end(saved: str, modules: Namespace, tmp_path: Path) -> None:
    base = base_with(tmp_path / "base", SAVED[saved])
    tokenizer = modules.rlhf_data.load_tokenizer(base, None)
    assert (
        modules.rlhf_data.prompt_ids("one two three", tokenizer)
        == judged(base, "one two three")[:-1]
    )


def test_the_end_of_a_text_that_fills_its_sequences_is_learned(
    modules: Namespace, tmp_path: Path
) -> None:
    """The first token of a piece follows nothing and is not learned: a last piece of the end alone would teach nothing."""
    text = "one two three four five six seven eight nine ten"
    size = len(judged(BASE, text)) - 1
    assert size >= 8
    found, _, _ = learned(
        modules, jsonl(tmp_path / "d.jsonl", [{"text": text}]), tmp_path / "out", max_length=size
    )
    assert found[-1][0][-1] == 0 and found[-1][1][-1] == 1
    assert [token for ids, _ in found for token in ids] == judged(BASE, text)


def test_preflight_counts_what_a_cut_in_the_tokenizer_would_hide(tmp_path: Path) -> None:
    from runner.advice.facts import data as facts

    rows = [{"prompt": "Q: ", "completion": "word " * 100}] * 4
    data = jsonl(tmp_path / "d.jsonl", rows)
    for name in ("truncation", "padding"):
        found = facts.facts(data, 50, base_with(tmp_path / name, SAVED[name]))
        plain = facts.facts(data, 50, BASE)
        assert found["truncated"] == plain["truncated"] == 100.0
        assert found["longest"] == plain["longest"]


# -- F4: packing ----------------------------------------------------------------------------------------------------------------------------------


def configured(folder: Path, kind: str, **more: Any) -> Path:
    """A base folder with the configuration of an architecture, and the tiny base's tokenizer."""
    from transformers import CONFIG_MAPPING

    shutil.copytree(BASE, folder)
    CONFIG_MAPPING[kind](**more).save_pretrained(folder)
    return folder


KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({"num_hidden_layers": 2}, False),
    "gpt2": ({"n_layer": 2}, False),
    "gemma2": ({"num_hidden_layers": 2}, False),
    "opt": ({"num_hidden_layers": 2}, True),
    "qwen3_5_text": ({"num_hidden_layers": 4}, True),
    "mamba": ({"num_hidden_layers": 2}, True),
    "falcon": ({"num_hidden_layers": 2}, True),
    "bloom": ({"n_layer": 2}, True),
    "mpt": ({"n_layers": 2}, True),
    "xglm": ({"num_layers": 2}, True),
    "lfm2": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, True),
    "mamba2": ({"num_hidden_layers": 2}, True),
    "falcon_h1": ({"num_hidden_layers": 2}, True),
    "rwkv": ({"num_hidden_layers": 2}, True),
}
"""Architectures of transformers by whether documents that share a sequence see each other."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_itself_says_whether_documents_see_each_other(
    kind: str, modules: Namespace, tmp_path: Path
) -> None:
    more, leaks = KINDS[kind]
    found = modules.packing.probe(configured(tmp_path / "base", kind, **more))
    assert found.difference is not None, found.why
    assert found.leaks is leaks


def test_where_documents_would_see_each_other_packing_is_off_and_said_or_refused_where_it_is_asked_for(
    modules: Namespace, tmp_path: Path
) -> None:
    base = configured(
        tmp_path / "base", "opt", vocab_size=1024, eos_token_id=0, num_hidden_layers=2
    )
    data = jsonl(tmp_path / "d.jsonl", [{"text": f"row {number}"} for number in range(6)])
    _, manifest, said = learned(modules, data, tmp_path / "out", base=base, packing="auto")
    assert manifest["packing"] is False and manifest["sequences"]["train"] == 6
    assert manifest["packing_probe"]["documents_see_each_other"] is True
    assert "warning: packing is off" in said
    with pytest.raises(Exception, match="say packing=false"):
        learned(modules, data, tmp_path / "asked", base=base, packing="true")
    _, manifest, said = learned(modules, data, tmp_path / "tiny", packing="auto")
    assert (
        manifest["packing"] is True
        and manifest["sequences"]["train"] == 1
        and "packing" not in said
    )


# -- F5, F6, F9: rows -------------------------------------------------------------------------------------------------------------------------------

FORMATS = (".jsonl", ".json", ".csv", ".parquet")


def written(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The same rows in the format that the file's name says."""
    if file.suffix == ".jsonl":
        return jsonl(file, rows)
    if file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif file.suffix == ".csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        with file.open("w", newline="", encoding="utf-8-sig") as table:
            writer = csv.writer(table)
            writer.writerow(names)
            for row in rows:
                cells = [row.get(name, "") for name in names]
                writer.writerow(
                    [cell if isinstance(cell, str) else json.dumps(cell) for cell in cells]
                )
    else:
        import pyarrow as arrow
        import pyarrow.parquet as parquet  # type: ignore[import-untyped]

        parquet.write_table(
            arrow.Table.from_pylist(
                [dict(row) for row in rows], arrow.Table.from_pylist(_with_every_name(rows)).schema
            ),
            file,
        )
    return file


def _with_every_name(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Arrow takes the columns of a table from its first row alone."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


words = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12
).filter(str.strip)
# Each function has parameters of its own, as in real data: a table has those of all in each row.
calls = st.sampled_from(["get_weather", "calc"]).flatmap(
    lambda name: words.map(
        lambda word: {
            "type": "function",
            "function": {
                "name": name,
                "arguments": {"city" if name == "get_weather" else "expr": word},
            },
        }
    )
)
answers = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": words}, optional={"weight": st.sampled_from([0, 1])}
) | st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": st.just(""),
        "tool_calls": st.lists(calls, min_size=1, max_size=2),
    }
)
turns = st.lists(st.tuples(words, answers), min_size=1, max_size=3).map(
    lambda pairs: [
        message
        for asked, answer in pairs
        for message in ({"role": "user", "content": asked}, answer)
    ]
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"}}},
        },
    }
    for name, key in (("get_weather", "city"), ("calc", "expr"))
]
conversations = st.lists(
    st.fixed_dictionaries({"messages": turns}, optional={"tools": st.just(TOOLS)}),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=conversations)
def test_rows_are_the_same_tokens_in_every_format(
    rows: list[dict[str, Any]], modules: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("formats")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    rows = [
        *rows,
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ]
    found = []
    for suffix in FORMATS:
        data = written(folder / f"d{suffix}", rows)
        documents, manifest, _ = learned(
            modules, data, folder / suffix[1:], chat_template=template, max_length=512
        )
        found.append((documents, manifest["rows"], manifest["turns_marked_as_read_only"]))
    assert all(each == found[0] for each in found)


def test_what_a_table_fills_up_with_null_is_not_learned(modules: Namespace, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": {key: "x"}}}]}], "tools": TOOLS}
        for name, key in (("get_weather", "city"), ("calc", "expr"))
    ]  # fmt: skip
    found, _, _ = learned(
        modules,
        written(tmp_path / "d.parquet", rows),
        tmp_path / "out",
        chat_template=tmp_path / "chat.jinja",
    )
    assert all("null" not in text for text in text_of(found, whole=True))


MARKED = {
    "openai": {"weight": 0},
    "axolotl": {"train": False},
    "ms-swift": {"loss": False},
    "table": {"weight": 0.0},
}


@pytest.mark.parametrize("mark", MARKED)
@pytest.mark.parametrize("layout", ["messages", "sharegpt"])
def test_a_turn_that_is_marked_is_read_and_not_learned(
    layout: str, mark: str, modules: Namespace, tmp_path: Path
) -> None:
    if layout == "messages":
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "BAD", **MARKED[mark]}, {"role": "user", "content": "b"},
                {"role": "assistant", "content": "good", "weight": 1}]  # fmt: skip
        row = {"messages": said}
    else:
        row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "BAD", **MARKED[mark]}, {"from": "human", "value": "b"},
                                 {"from": "gpt", "value": "good"}]}  # fmt: skip
    found, manifest, said_of_it = learned(
        modules, jsonl(tmp_path / "d.jsonl", [row]), tmp_path / "out"
    )
    (text,) = text_of(found)
    assert "BAD" not in text and "good" in text
    assert "BAD" in text_of(found, whole=True)[0] and manifest["turns_marked_as_read_only"] == 1
    assert "warning: 1 turns are read but not learned, as they are marked" in said_of_it


@pytest.mark.parametrize("mark", [{"weight": 0.5}, {"train": "no"}, {"loss": [1]}])
def test_a_mark_that_is_neither_yes_nor_no_makes_a_bad_row(
    mark: dict[str, Any], modules: Namespace, tmp_path: Path
) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", **mark},
        ]
    }
    with pytest.raises(
        Exception, match=r"d\.jsonl:1: .* a turn is learned \(1, true\) or only read"
    ):
        learned(modules, jsonl(tmp_path / "d.jsonl", [row]), tmp_path / "out")


@pytest.mark.parametrize("mark", ["mask", "train_detail", "ignore"])
def test_a_mark_that_is_not_read_makes_a_bad_row(
    mark: str, modules: Namespace, tmp_path: Path
) -> None:
    data = jsonl(tmp_path / "d.jsonl", [marked({mark: True})])
    with pytest.raises(Exception, match=f'"{mark}" of message 2 of "messages" is not read'):
        learned(modules, data, tmp_path / "out")


def test_an_empty_answer_makes_a_bad_row_unless_it_is_only_read(
    modules: Namespace, tmp_path: Path
) -> None:
    data = jsonl(tmp_path / "d.jsonl", [marked({"content": " "})])
    with pytest.raises(Exception, match='message 2 of "messages" is an empty answer'):
        learned(modules, data, tmp_path / "out")
    data = jsonl(tmp_path / "e.jsonl", [marked({"content": "", "weight": 0})])
    assert learned(modules, data, tmp_path / "read")[1]["turns_marked_as_read_only"] == 1


def test_a_row_that_is_marked_and_a_row_of_two_formats_are_said(
    modules: Namespace, tmp_path: Path
) -> None:
    rows = [{"text": f"T{n}", "prompt": "P", "completion": "C", "weight": n % 2} for n in range(4)]
    _, _, said = learned(modules, jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out")
    assert "warning: the column weight is not read: each row is learned" in said
    assert "read as text, and have the columns of prompt-completion, too: say format=NAME" in said


def test_a_pointer_of_git_lfs_is_no_data(modules: Namespace, tmp_path: Path) -> None:
    for name in ("d.jsonl", "d.csv", "d.parquet", "d.txt", "d.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n")
        with pytest.raises(Exception, match=f"{name}: a pointer of Git LFS, not the data"):
            learned(modules, tmp_path / name, tmp_path / f"{name}-out")


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_other_layouts_are_in_the_prompt(
    as_text: bool, modules: Namespace, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    tools = [{"name": "get_news", "description": "the news", "parameters": {}}]
    rows = [
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "no"}],
            "tools": json.dumps(tools) if as_text else tools,
        },
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "no"}],
            "tools": "[]" if as_text else [],
        },
    ]
    found, _, _ = learned(
        modules,
        jsonl(tmp_path / "d.jsonl", rows),
        tmp_path / "out",
        chat_template=tmp_path / "chat.jinja",
    )
    texts = text_of(found, whole=True)
    assert "get_news" in texts[0] and "TOOL" not in texts[1]
    alpaca = {"instruction": "q", "output": "no", "tools": tools}
    found, _, _ = learned(
        modules,
        jsonl(tmp_path / "a.jsonl", [alpaca]),
        tmp_path / "alpaca",
        chat_template=tmp_path / "chat.jinja",
    )
    assert "get_news" in text_of(found, whole=True)[0]


def test_what_a_tool_cannot_do_is_refused_where_a_recipe_hands_rows_on(
    modules: Namespace, tmp_path: Path
) -> None:
    """axolotl@1 and unsloth@1 hand on roles and contents alone."""
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for row, why in (
        ({"messages": [said[0], said[1] | {"weight": 0}]}, '"weight" of message 2 is not read'),
        ({"messages": said, "tools": TOOLS}, '"tools" are not read'),
    ):
        options = {"data": jsonl(tmp_path / "d.jsonl", [row]), "out": tmp_path / "out", "format": "auto", "kinds": ["messages"], "columns": "{}",
                   "max_bad_rows": 0, "eval_fraction": 0.0, "seed": 0}  # fmt: skip
        with pytest.raises(Exception, match=why):
            modules.tool_data.prepare(Namespace(**options))


# -- F8, F12, F13, F14: templates and readers ----------------------------------------------------------------------------------------------------------


def test_a_template_in_a_file_knows_the_end_token_of_a_base_that_does_not_name_it(
    modules: Namespace, tmp_path: Path
) -> None:
    base = base_with(tmp_path / "base", {}, eos_token=None, pad_token=None, chat_template=None)
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    )
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    found, _, said = learned(
        modules,
        jsonl(tmp_path / "d.jsonl", [row]),
        tmp_path / "out",
        base=base,
        chat_template=tmp_path / "chat.jinja",
    )
    assert text_of(found, whole=True) == [f"user: hi\nassistant: yo{END}\n"]
    assert END in text_of(found)[0] and "nothing teaches" not in said


def test_of_named_templates_the_one_for_tools_writes_tools(
    modules: Namespace, tmp_path: Path
) -> None:
    named = [
        {"name": "default", "template": TEMPLATE.replace("TOOL", "NONE")},
        {"name": "tool_use", "template": TEMPLATE},
    ]
    base = base_with(tmp_path / "base", {}, chat_template=named)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": said}, {"messages": said, "tools": TOOLS}]
    found, _, _ = learned(
        modules, jsonl(tmp_path / "d.jsonl", rows), tmp_path / "out", base=base, max_length=512
    )
    texts = text_of(found, whole=True)
    assert "TOOL" not in texts[0] and "TOOL" in texts[1] and "NONE" not in texts[1]


def test_rows_that_a_template_or_a_reader_refuses_are_bad_rows_like_others(
    modules: Namespace, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + TEMPLATE
    )
    good = json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    )
    system = json.dumps(
        {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}]}
    )
    huge = good[:-1] + ', "id": ' + "9" * 5000 + "}"
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([good, system, huge, good]))
    with pytest.raises(
        Exception,
        match=r"(?s)2 bad rows beside 2 good.*d\.jsonl:2: .*no system.*d\.jsonl:3: not usable JSON",
    ):
        learned(modules, data, tmp_path / "out", chat_template=tmp_path / "chat.jinja")
    _, manifest, _ = learned(
        modules, data, tmp_path / "again", chat_template=tmp_path / "chat.jinja", max_bad_rows=2
    )
    assert manifest["rows"] == 2


# -- F7: folders -----------------------------------------------------------------------------------------------------------------------------------------

ROW = {"text": "a row of data"}


def test_files_beside_the_data_are_no_data_and_named(modules: Namespace, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    jsonl(folder / "train.jsonl", [{"text": f"row {n}"} for n in range(3)])
    for name in (
        "README.txt",
        "LICENSE.txt",
        "requirements.txt",
        "readme_zh.txt",
        ".hidden.jsonl",
        ".git/a.txt",
        "notes.md",
        "picture.png",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("no data")
    (folder / "dataset_info.json").write_text(
        json.dumps({"a": {"file_name": "train.jsonl"}}, indent=1)
    )
    found, manifest, said = learned(modules, folder, tmp_path / "out")
    assert len(found) == 3 and manifest["files"] == ["train.jsonl"]
    for name in (
        "README.txt",
        "LICENSE.txt",
        "requirements.txt",
        "readme_zh.txt",
        ".hidden.jsonl",
        ".git",
        "notes.md",
        "picture.png",
        "dataset_info.json",
    ):
        (line,) = (line for line in said.splitlines() if name in line)
        assert line.startswith("data: warning: left out, ")


def test_a_file_about_the_data_does_not_decide_the_format(
    modules: Namespace, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    jsonl(folder / "train.jsonl", [{"prompt": "a", "completion": "b"}])
    (folder / "README.txt").write_text("about")
    _, manifest, _ = learned(modules, folder, tmp_path / "out")
    assert manifest["format_of_rows"] == "prompt-completion"


@pytest.mark.parametrize(
    "name",
    [
        "test.jsonl",
        "validation.jsonl",
        "my-test-00000-of-00002.jsonl",
        "test/0000.jsonl",
        "dev.jsonl",
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_are_named_as_rows_to_judge_by_are_held_out_and_not_learned(
    streaming: bool, name: str, modules: Namespace, tmp_path: Path
) -> None:
    folder = tmp_path / "d"
    jsonl(
        folder / "train.jsonl", [{"text": f"learn {n}"} for n in range(5)] + [{"text": "judge 1"}]
    )
    jsonl(folder / name, [{"text": f"judge {n}"} for n in range(3)])
    found, manifest, said = learned(
        modules, folder, tmp_path / "out", eval_fraction=0.5, streaming=streaming
    )
    assert manifest["rows_held_out"] == 3 and manifest["sequences"]["held_out"] == 3
    assert "held out, by its name" in said and "eval_fraction 0.5 is ignored" in said
    if streaming:
        stream = modules.stream_data.Stream(folder, tmp_path / "out", BASE, 0)
        found = [
            (ids.tolist(), marks.tolist()) for n in range(5) for ids, marks in stream.documents(n)
        ]
    assert sorted(text_of(found, whole=True)) == [f"learn {n}{END}" for n in range(5)]
    with pytest.raises(Exception, match=r"eval_fraction=0 judges nothing; say eval_fraction=0\.05"):
        learned(modules, folder, tmp_path / "none", eval_fraction=0.0)


def test_a_file_that_is_given_itself_is_learned_whatever_it_is_called(
    modules: Namespace, tmp_path: Path
) -> None:
    found, _, _ = learned(
        modules, jsonl(tmp_path / "test.jsonl", [ROW, {"text": "more"}]), tmp_path / "out"
    )
    assert len(found) == 2


def test_lists_and_compressed_files_are_read(modules: Namespace, tmp_path: Path) -> None:
    import pyarrow as arrow

    rows = [{"text": f"row {n}"} for n in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = {}
    for name, content in {
        "a.json": json.dumps(rows).encode(),
        "b.json": lines,
        "c.jsonl.gz": gzip.compress(lines),
        "d.json.gz": gzip.compress(json.dumps(rows).encode()),
        "e.jsonl.zst": bytes(arrow.compress(lines, codec="zstd", asbytes=True)),
        "f.csv.gz": gzip.compress(("text\n" + "\n".join(row["text"] for row in rows)).encode()),
    }.items():
        (tmp_path / name).write_bytes(content)
        found[name], _, _ = learned(modules, tmp_path / name, tmp_path / f"out-{name}")
    first = found["a.json"]
    assert len(first) == 4 and all(each == first for each in found.values())


# -- the table of docs/sft.md -------------------------------------------------------------------------------------------------------------------------------

ASKED = "<|im_start|>user\nQ<|im_end|>\n"
ANSWERED = f"{ASKED}<|im_start|>assistant\nA<|im_end|>\n"
MARKS = ({"weight": 0}, {"train": False}, {"loss": False})


def marked(mark: Mapping[str, Any]) -> dict[str, Any]:
    """A conversation whose first answer is marked."""
    user = {"role": "user", "content": "Q"}
    return {"messages": [user, {"role": "assistant", "content": "B", **mark}, user, {"role": "assistant", "content": "A"}]}  # fmt: skip


TABLE: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    # The first token of a document follows nothing, so that of T is read and not learned.
    '`{"text": "T"}`': ([{"text": "T"}], f"T{END}", END),
    '`{"prompt": "P", "completion": "C"}`': ([{"prompt": "P ", "completion": "C"}], f"P C{END}", f"C{END}"),
    '`{"messages": [user Q, assistant A]}`': (
        [{"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}], ANSWERED, "A<|im_end|>\n"),
    "a turn with `weight: 0`, `train: false` or `loss: false`": (
        [marked(mark) for mark in MARKS], f"{ASKED}<|im_start|>assistant\nB<|im_end|>\n{ANSWERED}", "A<|im_end|>\n"),
    '`{"instruction": "I", "output": "A"}`': ([{"instruction": "Q", "output": "A"}], ANSWERED, "A<|im_end|>\n"),
    '`{"conversations": [human Q, gpt A]}`': (
        [{"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}], ANSWERED, "A<|im_end|>\n"),
}  # fmt: skip
"""The rows of the first table: rows of data, what is read of each, and what is learned."""
FILES = {
    "`train.jsonl`, or any other name": ("learned", ["train.jsonl", "rows-7.jsonl", "contest.jsonl", "sub/part.jsonl"]),
    "`test`, `validation`, `val`, `dev`, `eval`, `holdout`, `unseen` as a word of the name, or as the folder": (
        "held out", ["testset.jsonl", "hold_out.jsonl", "unseen.jsonl", "test_data/a.jsonl", "Validation-Set/a.jsonl", "test.jsonl", "my-validation.jsonl", "val_2.jsonl", "dev.jsonl", "eval.jsonl", "test/part.jsonl", "validation/a.jsonl"]),
    "`README.txt`, `LICENSE`, `requirements.txt`, hidden files, JSON files with a single object": (
        "left out", ["README.txt", "LICENSE", "requirements.txt", ".hidden.jsonl", "info.json"]),
    "files with other extensions": ("left out", ["notes.md", "picture.png", "rows.xml"]),
}  # fmt: skip
"""The rows of the second table: what becomes of files, and names of some."""


def first_cells(head: str) -> list[str]:
    """The first cell of each row of the table in docs/sft.md that begins with this line."""
    section = (ROOT / "docs" / "sft.md").read_text().partition("### What is read, what is learned")[2]  # fmt: skip
    rows = section.partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()
    return [row.split("|")[1].strip() for row in rows[1:]]


def test_each_row_of_the_tables_has_its_case() -> None:
    assert first_cells(
        "| row | tokens that the model reads | tokens that the model is trained on |"
    ) == list(TABLE)
    assert first_cells("| file in the dataset directory | use |") == list(FILES)


@pytest.mark.parametrize("cell", TABLE)
def test_what_the_table_says_is_read_and_learned_is(
    cell: str, modules: Namespace, tmp_path: Path
) -> None:
    rows, read, wanted = TABLE[cell]
    for number, row in enumerate(rows):
        data = jsonl(tmp_path / f"{number}.jsonl", [row])
        found, _, _ = learned(modules, data, tmp_path / f"out-{number}")
        assert text_of(found, whole=True) == [read]
        assert [text.strip() for text in text_of(found)] == [wanted.strip()]


@pytest.mark.parametrize("cell", FILES)
def test_what_the_table_says_of_files_in_a_folder_is_done(
    cell: str, modules: Namespace, tmp_path: Path
) -> None:
    done, names = FILES[cell]
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        jsonl(folder / "a.jsonl", [{"text": "always"}, {"text": "and this"}])
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(
            '{\n"text": "asked"\n}\n' if name == "info.json" else '{"text": "asked"}\n'
        )
        found, manifest, said = learned(modules, folder, tmp_path / f"out-{number}", eval_fraction=0.5)  # fmt: skip
        read = {text.removesuffix(END) for text in text_of(found, whole=True)}
        if done == "held out":
            assert manifest["rows_held_out"] == 1 and read == {"always", "and this"}, name
            assert f"held out, by its name: {Path(name).name}" in said
        elif done == "left out":
            assert "asked" not in read and manifest["rows"] == 2, name
            assert any("left out, " in line and name in line for line in said.splitlines())
        else:
            assert manifest["rows"] == 3 and name not in said, name


def test_a_configuration_is_asked_once_on_a_machine(
    modules: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[Path] = []

    def probe(base: Path) -> Any:
        asked.append(base)
        return modules.packing.Finding(0.0 if base != unknown else None, 1)

    monkeypatch.setattr(modules.packing, "probe", probe)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # or else a process asks
    copy, other, unknown = (base_with(tmp_path / name, {}) for name in ("copy", "other", "unknown"))
    for base, name, value in (
        (copy, "dtype", "float16"),
        (other, "hidden_size", 128),
        (unknown, "hidden_size", 32),
    ):
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {name: value}))
    for base in (BASE, BASE, copy, other, unknown, unknown):
        with modules.packing.asking(base) as answer:
            assert answer().leaks is False
    assert asked == [BASE, other, unknown, unknown]
    for kept in (tmp_path / "cache").rglob("*.json"):
        kept.write_text("{")
    with modules.packing.asking(BASE) as answer:
        assert answer().layers == 1
    assert asked[4:] == [BASE], "what is damaged is no answer"


def test_the_program_that_makes_tokens_does_not_wait_for_torch(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", [{"text": f"row {number}"} for number in range(4)])
    program = (
        "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__'); "
        "assert not sys.modules['torch'] and 'transformers' in sys.modules"
    )
    given = ["--data", data, "--base", BASE, "--out", tmp_path / "out", "--max-length", "32"]
    done = subprocess.run(
        [sys.executable, "-c", program, str(TRAINERS / "sft_data.py"), *map(str, given)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TRAINERS)},
    )
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.slow
def test_a_training_ends_where_its_model_shows_one_document_the_other(
    modules: Namespace, tmp_path: Path
) -> None:
    """Step `data` asked a small model, here of another base; the training asks the one that learns."""
    base = configured(
        tmp_path / "base",
        "opt",
        vocab_size=1024,
        eos_token_id=0,
        num_hidden_layers=2,
        hidden_size=64,
        ffn_dim=128,
        num_attention_heads=4,
        word_embed_proj_dim=64,
    )
    data = jsonl(tmp_path / "d.jsonl", [{"text": f"row {number}"} for number in range(40)])
    learned(modules, data, tmp_path / "tokens", packing="true", max_length=32)
    done = run(training(tmp_path / "tokens", tmp_path / "out", base=base, max_steps=1))
    assert done.returncode != 0
    assert "documents that share a sequence see each other in this model" in done.stderr
    assert "packing=false" in done.stderr
