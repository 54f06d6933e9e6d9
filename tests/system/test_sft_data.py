"""Claims about step `data` of `sft@1`: what it takes, what it says of bad rows, what it marks to be learned."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINERS = ROOT / "recipes" / "trainers"
BASE = ROOT / "fixtures" / "tiny-llama"
MODULES = ("sft_data", "layouts", "vocabulary", "tokens", "rows")

Prepare = Callable[..., dict[str, Any]]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Prepare]:
    """Run the step's program in this process; its manifest comes back."""
    monkeypatch.syspath_prepend(str(TRAINERS))

    def call(data: Path, *more: object, base: Path = BASE, length: int = 64) -> dict[str, Any]:
        import sft_data  # type: ignore[import-not-found]

        words = [
            "sft_data.py",
            "--data",
            data,
            "--base",
            base,
            "--out",
            tmp_path / "out",
            "--max-length",
            length,
            *more,
        ]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        sft_data.main()
        manifest: dict[str, Any] = json.loads((tmp_path / "out" / "manifest.json").read_text())
        return manifest

    yield call
    for name in MODULES:
        sys.modules.pop(name, None)


def learned_texts(folder: Path, least: int = 1) -> list[str]:
    """What is learned of each document, as text; with `least` 0 all that is read."""
    from tokenizers import Tokenizer
    from tokens import Tokens  # type: ignore[import-not-found]

    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    split = Tokens(folder, "train")
    documents = [document for number in range(len(split)) for document in split.documents(number)]
    return [
        tokenizer.decode(ids[learned >= least].tolist(), skip_special_tokens=False)
        for ids, learned in documents
    ]


GOOD = b'{"text": "a good row"}\n'
BAD = {
    "not json": (
        "d.jsonl",
        GOOD + b'{"text": "x"\n',
        "d.jsonl:2: not JSON: Expecting ',' delimiter at column 13",
    ),
    "not an object": (
        "d.jsonl",
        GOOD + b'["x"]\n',
        "d.jsonl:2: a list where an object is expected",
    ),
    "json array": (
        "d.jsonl",
        b'[{"text": "x"}]\n',
        "d.jsonl:1: a list where an object is expected; each line holds one object",
    ),
    "not utf-8": ("d.jsonl", GOOD + b'{"text": "\xff"}\n', "d.jsonl:2: not UTF-8: byte 0xff"),
    "half a pair": (
        "d.jsonl",
        GOOD + b'{"text": "\\ud83d"}\n',
        "d.jsonl:2: the text holds half a surrogate pair",
    ),
    "deep": ("d.jsonl", GOOD + b"[" * 100_000 + b"\n", "d.jsonl:2: not"),
    "no column": (
        "d.jsonl",
        GOOD + b'{"body": "x", "title": "y"}\n',
        'd.jsonl:2: no column "text"; it has: body, title',
    ),
    "no known column": (
        "d.jsonl",
        b'{"body": "x"}\n',
        "d.jsonl:1: no column to learn from; it has: body; sft reads text, or prompt and completion",
    ),
    "empty text": ("d.jsonl", GOOD + b'\n{"text": "  "}\n', 'd.jsonl:3: "text" is empty'),
    "number": (
        "d.jsonl",
        GOOD + b'{"text": 4}\n',
        'd.jsonl:2: "text" is a number, a string is expected',
    ),
    "null": (
        "d.jsonl",
        GOOD + b'{"text": null}\n',
        'd.jsonl:2: "text" is null, a string is expected',
    ),
    "empty completion": (
        "d.jsonl",
        b'{"prompt": "x", "completion": ""}\n',
        'd.jsonl:1: "completion" is empty',
    ),
    "no messages": ("d.jsonl", b'{"messages": []}\n', 'd.jsonl:1: "messages" is empty'),
    "bad message": (
        "d.jsonl",
        b'{"messages": [{"role": "user"}]}\n',
        'd.jsonl:1: message 1 of "messages" is not {"role"',
    ),
    "parts": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}\n',
        '"content": "…"}: its "content" is a list, a string is expected; write the text of its parts as one string',
    ),
    "no answer": (
        "d.jsonl",
        b'{"messages": [{"role": "user", "content": "x"}]}\n',
        'd.jsonl:1: "messages" has no message of the assistant',
    ),
    "sharegpt as messages": (
        "d.jsonl",
        b'{"messages": [{"from": "human", "value": "x"}]}\n',
        'd.jsonl:1: message 1 of "messages" has "from" and "value": format=sharegpt',
    ),
    "sharegpt tool": (
        "d.jsonl",
        b'{"conversations": [{"from": "function_call", "value": "x"}]}\n',
        'd.jsonl:1: turn 1 of "conversations" is by "function_call"; read are human',
    ),
    "sharegpt turn": (
        "d.jsonl",
        b'{"conversations": ["x"]}\n',
        'd.jsonl:1: turn 1 of "conversations" is not {"from"',
    ),
    "sharegpt without answer": (
        "d.jsonl",
        b'{"conversations": [{"from": "human", "value": "x"}]}\n',
        'd.jsonl:1: "conversations" has no message of the assistant',
    ),
    "sharegpt empty": (
        "d.jsonl",
        b'{"conversations": []}\n',
        'd.jsonl:1: "conversations" is empty, a list of turns',
    ),
    "alpaca without answer": (
        "d.jsonl",
        b'{"instruction": "x", "output": " "}\n',
        'd.jsonl:1: "output" is empty',
    ),
    "alpaca number": (
        "d.jsonl",
        b'{"instruction": 4, "output": "y"}\n',
        'd.jsonl:1: "instruction" is a number, a string is expected',
    ),
    "alpaca history": (
        "d.jsonl",
        b'{"instruction": "x", "output": "y", "history": [["a"]]}\n',
        'd.jsonl:1: "history" is no list of pairs',
    ),
    "fields": ("d.csv", b"text,n\none,1\ntwo\n", "d.csv:3: 1 fields where the header has 2"),
    "fields after newline in quotes": (
        "d.csv",
        b'text,n\n"o\nne",1\ntwo\n',
        "d.csv:4: 1 fields where the header has 2",
    ),
    "csv not utf-8": ("d.csv", b"text\none\ntw\xe9\n", "d.csv:3: not UTF-8: byte 0xe9"),
    "csv quote": ("d.csv", b'text\none\n"two" x\n', "d.csv:3: not CSV: "),
    "csv header twice": (
        "d.csv",
        b"text,text\none,two\n",
        "d.csv:1: the header names a column twice",
    ),
    "text not utf-8": ("d.txt", b"one\ntwo\nthr\xff\n", "d.txt:3: not UTF-8: byte 0xff"),
    "not parquet": ("d.parquet", b"PAR1 and then nothing of the kind", "d.parquet: not Parquet: "),
    "empty": ("d.jsonl", b"", "the data set is empty: no row in d.jsonl"),
    "header only": ("d.csv", b"text\n", "the data set is empty: no row in d.csv"),
    "unknown kind": ("d.xlsx", b"x", "d.xlsx: not a data file; its name must end in one of .jsonl"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_named_with_its_place(case: str, prepare: Prepare, tmp_path: Path) -> None:
    name, content, complaint = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / name)
    assert complaint in str(ended.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_every_bad_row_is_reported_at_once_and_may_be_left_out(
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a.jsonl").write_bytes(GOOD + b"{\n")
    (tmp_path / "d" / "b.csv").write_bytes(b"text\n  \nfine\n")
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / "d")
    assert "2 bad rows beside 2 good ones; max_bad_rows=2 would leave them out" in str(ended.value)
    assert "a.jsonl:2: not JSON" in str(ended.value) and 'b.csv:2: "text" is empty' in str(
        ended.value
    )
    manifest = prepare(tmp_path / "d", "--max-bad-rows", 2)
    assert (manifest["rows"], manifest["bad_rows"]) == (2, 2)
    assert "b.csv:2" in capsys.readouterr().out


def test_a_folder_without_data_files_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "README.md").write_text("words")
    with pytest.raises(
        SystemExit,
        match=r"no data file in this folder, none ends in .*left out, no data by the end of its name: README\.md",
    ):
        prepare(tmp_path / "d")
    with pytest.raises(SystemExit, match="no such file or folder"):
        prepare(tmp_path / "e")


def test_what_does_not_fit_the_model_is_refused(prepare: Prepare, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_bytes(GOOD)
    with pytest.raises(SystemExit, match="max_length 1024 is more than the 512 positions"):
        prepare(data, length=1024)
    with pytest.raises(
        SystemExit, match=r"config\.json: no such file; a transformers model folder has one"
    ):
        prepare(data, base=tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    for file in BASE.iterdir():
        (small / file.name).write_text(
            file.read_text().replace('"vocab_size": 1024', '"vocab_size": 64')
        )
    with pytest.raises(SystemExit, match="the base model knows 64: they do not belong together"):
        prepare(data, base=small)
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps({"messages": [{"role": "assistant", "content": "x"}]}))
    (small / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(
        SystemExit,
        match="no chat template, which conversations need: give one with chat_template=FILE",
    ):
        prepare(chat, base=small)


def test_the_same_rows_are_the_same_tokens_from_any_format(
    prepare: Prepare, tmp_path: Path
) -> None:
    import pyarrow as arrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    rows = [
        {"prompt": f"how much is {n}, twice?\t", "completion": f' "{2 * n}"\nis it — 🙂'}
        for n in range(20)
    ]
    (tmp_path / "d.jsonl").write_text(
        "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    for name, delimiter in (("d.csv", ","), ("d.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["completion", "prompt"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    arrays = [
        prepare(tmp_path / f"d.{suffix}", "--eval-fraction", 0.3)["arrays"]
        for suffix in ("jsonl", "csv", "tsv", "parquet")
    ]
    assert all(found == arrays[0] for found in arrays)


def test_columns_may_have_other_names(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("question,answer\none?,two\n")
    assert (
        prepare(tmp_path / "d.csv", "--columns", '{"prompt": "question", "completion": "answer"}')[
            "format_of_rows"
        ]
        == "prompt-completion"
    )
    with pytest.raises(
        SystemExit, match="columns: promt is none of text, prompt, completion, messages"
    ):
        prepare(tmp_path / "d.csv", "--columns", '{"promt": "question"}')


def test_of_a_prompt_and_completion_the_completion_and_the_end_are_learned(
    prepare: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(
        '{"prompt": "the assert statement", "completion": " is convenient"}\n'
    )
    prepare(tmp_path / "d.jsonl")
    assert learned_texts(tmp_path / "out") == [" is convenient<|endoftext|>"]


def test_of_a_conversation_the_answers_are_learned(prepare: Prepare, tmp_path: Path) -> None:
    talk = [
        ("system", "be brief"),
        ("user", "assert?"),
        ("assistant", "a statement"),
        ("user", "and del?"),
        ("assistant", "one too"),
    ]
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
    )
    prepare(tmp_path / "d.jsonl", length=256)
    assert learned_texts(tmp_path / "out") == ["a statement<|im_end|>\none too<|im_end|>\n"]


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {
    "type": "function",
    "id": "1",
    "function": {"name": "look_up", "arguments": '{"word": "del"}'},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "finds a word",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "what is del?", "tool_calls": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "a statement", "name": "look_up"},
    {"role": "assistant", "content": "it deletes", "reasoning_content": "so it says"},
]


@pytest.mark.parametrize("written", ["as they are", "as text"])
def test_calls_of_tools_and_thoughts_are_learned_and_what_tools_say_is_read(
    written: str, prepare: Prepare, tmp_path: Path
) -> None:
    """OpenAI has arguments as text, CSV has the columns so; templates want objects."""
    row: dict[str, Any] = {"messages": CALLED, "tools": [TOOL]}
    if written == "as text":
        row = {name: json.dumps(value) for name, value in row.items()}
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (tmp_path / "calls.jinja").write_text(CALLS)
    manifest = prepare(
        tmp_path / "d.jsonl", "--chat-template", tmp_path / "calls.jinja", length=512
    )
    call, answer = (
        '<call>look_up {"word": "del"}</call><|im_end|>\n',
        "<think>so it says</think>it deletes<|im_end|>\n",
    )
    assert (learned_texts(tmp_path / "out"), manifest["turns_not_learned"]) == ([call + answer], 0)
    (read,) = learned_texts(tmp_path / "out", least=0)
    assert "finds a word" in read and "a statement" in read


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"tools": [TOOL]},
            "d.jsonl:1: the chat template writes nothing of the tool look_up: give one that takes tools with chat_template=FILE",
        ),
        ({"messages": CALLED}, "d.jsonl:1: the chat template writes nothing of the tool look_up"),
        (
            {"messages": CALLED[::3]},
            'd.jsonl:1: the chat template writes nothing of what the last message of "messages" was thought about',
        ),
        (
            {"tools": [{"type": "function"}]},
            'd.jsonl:1: "tools" is no list of functions, each {"type": "function"',
        ),
        ({"tools": "look_up"}, 'd.jsonl:1: "tools" is a string that is not JSON'),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            'd.jsonl:1: "tool_calls" of message 1 of "messages" is no list of',
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}
                ]
            },
            'd.jsonl:1: "arguments" of a call in message 1 of "messages" is a list, an object is expected',
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "thinking": ["y"]}]},
            'd.jsonl:1: "thinking" of message 1 of "messages" is a list, a string is expected',
        ),
    ],
)
def test_calls_that_the_chat_template_or_the_recipe_leaves_out_are_bad_rows(
    change: dict[str, Any], complaint: str, prepare: Prepare, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(
        json.dumps(
            {"messages": [*CALLED[:1], {"role": "assistant", "content": "a statement"}]} | change
        )
    )
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / "d.jsonl")
    assert complaint in str(ended.value)


TALK = {
    "messages": [
        {"role": "user", "content": "assert?"},
        {"role": "assistant", "content": "a statement"},
    ]
}
TURN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}END{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"


@pytest.mark.parametrize(
    ("row", "behind", "more", "end", "told"),
    [
        ({"text": "a statement"}, "<|im_end|>\n", (), "<|endoftext|>", ""),
        (TALK, "<|im_end|>\n", (), "<|im_end|>", ""),
        (TALK, " {{ eos_token }}", (), "<|endoftext|>", ""),
        (
            TALK,
            " ###\n",
            (),
            "<|endoftext|>",
            "the chat template ends an answer with no token of its own, so nothing teaches the model to stop",
        ),
        (TALK, "<|im_end|>\n<|endoftext|>", (), "<|im_end|>", ""),
        (
            TALK,
            "<|im_end|>",
            ("--eos-token", "<|endoftext|>"),
            "<|endoftext|>",
            "stops at <|endoftext|>; the chat template ends an answer with <|im_end|>",
        ),
        (TALK, "{{ eos_token }}", ("--eos-token", "<|im_end|>"), "<|im_end|>", ""),
    ],
)
def test_a_trained_model_stops_at_the_token_that_ends_an_answer_in_its_template(
    row: dict[str, Any], behind: str, more: tuple[str, ...], end: str, told: str,
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "d.jsonl").write_text(json.dumps(row))
    (tmp_path / "turn.jinja").write_text(TURN.replace("END", behind))
    assert (
        prepare(tmp_path / "d.jsonl", "--chat-template", tmp_path / "turn.jinja", *more)[
            "end_token"
        ]["text"]
        == end
    )
    assert told in (shown := capsys.readouterr().out) and bool(told) == ("stops at" in shown)


def test_text_ends_with_the_token_that_was_given(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        '{"prompt": "the assert statement", "completion": " is convenient"}\n'
    )
    assert prepare(tmp_path / "d.jsonl", "--eos-token", "<|im_end|>")["end_token"] == {
        "text": "<|im_end|>",
        "number": 2,
    }
    assert learned_texts(tmp_path / "out") == [" is convenient<|im_end|>"]
    with pytest.raises(SystemExit) as ended:
        prepare(tmp_path / "d.jsonl", "--eos-token", "<|end|>")
    known = "its tokens of that kind: <|endoftext|>, <|im_start|>, <|im_end|>"
    assert (
        str(ended.value)
        == f'data: eos_token "<|end|>" is not one token of the base model\'s vocabulary; {known}'
    )


TALK = [{"role": "user", "content": "Add.\n\n1 1"}, {"role": "assistant", "content": "2"}]
EARLIER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
]
SAME = {
    "alpaca": ({"instruction": "Add.", "input": "1 1", "output": "2"}, TALK),
    "alpaca without input": ({"instruction": "Add.\n\n1 1", "input": "", "output": "2"}, TALK),
    "alpaca with history": (
        {
            "instruction": "Add.",
            "input": "1 1",
            "output": "2",
            "system": "Be brief.",
            "history": [["Hello", "Hi"]],
        },
        [*EARLIER, *TALK],
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "human", "value": "Add.\n\n1 1"},
                {"from": "gpt", "value": "2"},
            ]
        },
        TALK,
    ),
    "sharegpt of roles": ({"conversations": TALK}, TALK),
    "sharegpt with a system column": (
        {
            "system": "Be brief.",
            "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}],
        },
        EARLIER,
    ),
    "sharegpt as CSV has it": (
        {
            "conversations": json.dumps(
                [{"from": "user", "value": "Add.\n\n1 1"}, {"from": "model", "value": "2"}]
            )
        },
        TALK,
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_rows_of_other_tools_are_the_conversations_that_they_mean(
    case: str, prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, conversation = SAME[case]
    (tmp_path / "messages.jsonl").write_text(json.dumps({"messages": conversation}) + "\n")
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    kept = {}
    for name in ("messages", "other"):
        manifest = prepare(tmp_path / f"{name}.jsonl")
        kept[name] = (
            learned_texts(tmp_path / "out"),
            {key: manifest[key] for key in ("tokens", "end_token", "format_of_rows")},
        )
    layout = case.partition(" ")[0]
    assert kept["other"] == kept["messages"] and manifest["layout"] == layout
    assert f"1 rows (messages of {layout} rows)" in capsys.readouterr().out


def test_columns_of_another_layout_may_have_other_names(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "Add.", "output": "2"}) + "\n")
    assert (
        prepare(tmp_path / "d.jsonl", "--columns", '{"instruction": "question"}')["layout"]
        == "alpaca"
    )
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
        + "\n"
    )
    assert prepare(tmp_path / "d.jsonl", "--format", "sharegpt")["rows"] == 1


def test_alpaca_rows_for_a_model_without_a_chat_template_are_reported_with_what_to_do(
    prepare: Prepare, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    (tmp_path / "d.jsonl").write_text(json.dumps({"instruction": "Add.", "output": "2"}) + "\n")
    with pytest.raises(
        SystemExit,
        match="chat_template=FILE, or learn them as plain text with format=prompt-completion columns=",
    ):
        prepare(tmp_path / "d.jsonl", base=base)
    columns = '{"prompt": "instruction", "completion": "output"}'
    assert (
        prepare(tmp_path / "d.jsonl", "--columns", columns, base=base)["format_of_rows"]
        == "prompt-completion"
    )


def test_an_answer_that_the_template_writes_differently_later_is_not_learned(
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "forgets.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.role }}] {% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    talk = [
        ("user", "assert?"),
        ("assistant", "a statement"),
        ("user", "and del?"),
        ("assistant", "one too"),
    ]
    (tmp_path / "d.jsonl").write_text(
        json.dumps({"messages": [{"role": role, "content": text} for role, text in talk]})
    )
    assert prepare(tmp_path / "d.jsonl", "--chat-template", template)["turns_not_learned"] == 1
    assert learned_texts(tmp_path / "out") == [" one too"]  # the space is part of its first token
    assert "1 turns are read but not learned" in capsys.readouterr().out


def test_long_text_is_cut_in_pieces_and_loses_nothing(prepare: Prepare, tmp_path: Path) -> None:
    text = " ".join(f"assert number {n}" for n in range(200))
    (tmp_path / "d.txt").write_text(text)
    manifest = prepare(tmp_path / "d.txt", length=32)
    assert manifest["split_rows"] == 1 and manifest["truncated_rows"] == 0
    from tokenizers import Tokenizer
    from tokens import Tokens

    split = Tokens(tmp_path / "out", "train")
    ids = [
        int(token)
        for number in range(len(split))
        for document, _ in split.documents(number)
        for token in document
    ]
    assert (
        Tokenizer.from_file(str(BASE / "tokenizer.json")).decode(ids, skip_special_tokens=False)
        == text + "<|endoftext|>"
    )


def test_a_long_answer_is_cut_off_and_counted(
    prepare: Prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [("short", " answer"), ("short", " long" * 100), (" long" * 100, " never seen")]
    (tmp_path / "d.jsonl").write_text(
        "".join(
            json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows
        )
    )
    manifest = prepare(tmp_path / "d.jsonl", length=32)
    assert (
        manifest["rows"],
        manifest["truncated_rows"],
        manifest["rows_without_anything_to_learn"],
    ) == (3, 2, 1)
    assert "2 rows truncated at 32 tokens (66.7%)" in capsys.readouterr().out


def test_a_held_out_row_is_nowhere_in_training_and_stays_held_out(
    prepare: Prepare, tmp_path: Path
) -> None:
    def split(rows: int) -> tuple[set[str], set[str]]:
        (tmp_path / "d.jsonl").write_text(
            "".join(json.dumps({"text": f"row number {n % 60}"}) + "\n" for n in range(rows))
        )
        prepare(tmp_path / "d.jsonl", "--eval-fraction", 0.2)
        from tokens import Tokens

        sides = [Tokens(tmp_path / "out", name) for name in ("train", "held_out")]
        train, held_out = (
            {str(ids.tolist()) for n in range(len(side)) for ids, _ in side.documents(n)}
            for side in sides
        )
        return train, held_out

    train, held_out = split(50)
    more_train, more_held_out = split(120)  # all of them twice
    assert train and held_out and not train & held_out and not more_train & more_held_out
    assert train < more_train and held_out <= more_held_out
    assert 0.05 < len(more_held_out) / 60 < 0.4
