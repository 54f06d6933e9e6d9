"""Promise: facts of models, data, packages and hosts are what their files and answers say; what they do not say is unknown."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from runner.advice.facts import machine
from runner.advice.facts.data import facts as data_facts
from runner.advice.facts.machine import facts as host_facts
from runner.advice.facts.model import facts as model_facts
from runner.advice.facts.packages import read_lock
from runner.advice.facts.program import is_named_training
from runner.advice.rules import RuleFacts
from runner.paths import shipped

FIXTURES = shipped() / "fixtures"


def png(path: Path, kind: int = 2) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, kind, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


def rows(path: Path, *items: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_a_models_own_files_are_read() -> None:
    facts = model_facts(FIXTURES / "tiny-llama", "fixtures/tiny-llama")
    assert facts["exists"] is True and facts["gated"] is False and facts["vision"] is False
    assert (
        facts["type"] == "llama"
        and facts["chat_template"] is True
        and facts["pad"] == facts["eos"] == "<|endoftext|>"
    )
    assert facts["adds_bos"] is False and facts["pipeline"] is None


@pytest.mark.parametrize(
    ("config", "vision"),
    [({"model_type": "llama"}, False), ({"model_type": "qwen2_5_vl", "vision_config": {}}, True), ({"text_config": {"vocab_size": 5}, "vision_config": {}}, True)],
)  # fmt: skip
def test_a_vision_part_is_seen_in_the_config(
    tmp_path: Path, config: dict[str, Any], vision: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(tmp_path, str(tmp_path))["vision"] is vision


def test_a_tokenizer_that_begins_twice_is_seen(tmp_path: Path) -> None:
    tokens = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert model_facts(tmp_path, "x")["adds_bos"] is False
    after = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": after}))
    facts = model_facts(tmp_path, "x")
    assert facts["template_bos"] is True and facts["adds_bos"] is True


IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (IM, "<|im_end|>"),
        ("{% for m in messages %}[INST]{{ m.content }}{{ eos_token }}{% endfor %}", "</s>"),
        (
            IM.replace(
                "{{ m.content }}", "{% generation %}{{ m.content | trim }}{%- endgeneration -%}"
            ),
            "<|im_end|>",
        ),
        ([{"name": "tools", "template": "x"}, {"name": "default", "template": IM}], "<|im_end|>"),
        (
            IM.replace("<|im_end|>", "<|over|>"),
            "<|over|>",
        ),  # which its tokenizer does not have as one token
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ""),
        ("", None),
    ],
)
def test_a_chat_template_tells_what_it_writes_behind_an_answer(
    tmp_path: Path, template: object, end: str | None
) -> None:
    tokens = {
        "eos_token": "</s>",
        "chat_template": template,
        "added_tokens_decoder": {"1": {"content": "</s>"}, "2": {"content": "<|im_end|>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert model_facts(tmp_path, "x")["turn_end"] == end


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages",
        "{{ raise_exception('only tools') }}",
        "{{ ''.__class__.__mro__ }}",
        "nothing of the messages",
    ],
)
def test_a_template_that_takes_no_plain_conversation_leaves_its_end_unknown(
    tmp_path: Path, template: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": template})
    )
    assert "turn_end" not in model_facts(tmp_path, "x")


def test_a_template_that_is_given_counts_and_one_that_only_a_tool_knows_is_unknown(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": IM})
    )
    (tmp_path / "t.jinja").write_text(IM.replace("<|im_end|>", "</s>"))
    assert model_facts(tmp_path, "x", tmp_path / "t.jinja")["turn_end"] == "</s>"
    assert "turn_end" not in model_facts(tmp_path, "x", tmp_path / "chatml")


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [
        ({"eos_token_id": [2, 1]}, {}, ["</s>", "<|im_end|>"]),
        ({}, {"eos_token_id": 2}, ["</s>", "<|im_end|>"]),
        ({"eos_token_id": 1}, {"eos_token_id": 2}, ["</s>"]),
        ({"eos_token_id": 77}, {}, None),
    ],
)
def test_generation_stops_at_the_tokenizers_end_and_at_those_of_its_settings(
    tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], stops: list[str] | None
) -> None:
    tokens = {
        "eos_token": "</s>",
        "chat_template": IM,
        "added_tokens_decoder": {"1": {"content": "</s>"}, "2": {"content": "<|im_end|>"}},
    }
    for name, value in (
        ("tokenizer_config", tokens),
        ("generation_config", generation),
        ("config", config),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    assert model_facts(tmp_path, "x").get("stops") == stops


def test_modules_are_named_by_the_head_of_the_weights(tmp_path: Path) -> None:
    head = json.dumps(
        {
            f"h.0.attn.{name}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
            for name in ("c_attn.weight", "c_attn.bias", "mask")
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"1234")
    assert model_facts(tmp_path, "x")["modules"] == ["c_attn"]
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert "modules" not in model_facts(tmp_path, "x")


def test_a_program_is_a_training_by_its_verb_and_not_by_the_value_of_an_option() -> None:
    assert is_named_training(["a", "trl", "sft", "--lr", "1"]) and is_named_training(
        ["a", "python", "my_train.py"]
    )
    assert not is_named_training(["export", "python", "export.py", "--kind", "sft"])


def test_what_is_no_model_here_or_on_the_hub_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert model_facts(tmp_path / "gone", "./gone")["exists"] is False
    assert "exists" not in model_facts(tmp_path / "a/b", "a/b"), "it may be on the Hub"


def test_rows_of_any_kind_have_columns(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}]}
    facts = data_facts(rows(tmp_path / "a.jsonl", talk, talk), None, None)
    assert (facts["rows"], facts["columns"], facts["conversational"], facts["images"]) == (
        2,
        ["messages"],
        True,
        0,
    )
    (tmp_path / "b.csv").write_text("question,answer\n1,2\n")
    assert data_facts(tmp_path / "b.csv", None, None)["columns"] == ["question", "answer"]
    (tmp_path / "c.json").write_text('[{"prompt": "a", "completion": "b"}]')
    assert data_facts(tmp_path / "c.json", None, None)["columns"] == ["prompt", "completion"]


def test_columns_that_have_other_names_are_known_and_layouts_that_want_converting_too(
    tmp_path: Path,
) -> None:
    pairs = data_facts(
        rows(tmp_path / "a.jsonl", {"question": "q", "chosen": "a", "worse": "b"}), None, None
    )
    called = pairs["called"]
    assert isinstance(called, dict) and {name: called[name] for name in ("prompt", "chosen", "rejected", "text")} == {
        "prompt": "question", "chosen": "chosen", "rejected": "worse", "text": None,
    }  # fmt: skip
    alpaca = {"instruction": "a", "input": "", "output": "b"}
    assert data_facts(rows(tmp_path / "b.jsonl", alpaca), None, None)["layout"] is None, (
        "without an input two names are enough"
    )
    assert (
        data_facts(rows(tmp_path / "c.jsonl", alpaca | {"input": "x"}), None, None)["layout"]
        == "alpaca"
    )
    assert (
        data_facts(
            rows(tmp_path / "d.jsonl", {"conversations": [{"from": "human", "value": "a"}]}),
            None,
            None,
        )["layout"]
        == "sharegpt"
    )


@pytest.mark.parametrize(
    ("turn", "more", "count"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, {}, 1),
        ({"role": "assistant", "content": [{"type": "text", "text": "b"}]}, {}, 1),
        ({"role": "assistant", "content": "b"}, {"tools": [{"name": "f"}]}, 1),
        ({"role": "assistant", "content": "b"}, {"tools": None}, 0),
    ],
)
def test_rows_that_call_tools_are_counted(
    tmp_path: Path, turn: dict[str, Any], more: dict[str, Any], count: int
) -> None:
    assert (
        data_facts(
            rows(tmp_path / "a.jsonl", {"messages": [turn], **more}, {"messages": []}), None, None
        )["tool_rows"]
        == count
    )


def test_parquet_has_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pa.table({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}), tmp_path / "a.parquet"
    )
    assert data_facts(tmp_path / "a.parquet", None, None)["columns"] == [
        "prompt",
        "chosen",
        "rejected",
    ]


def test_a_broken_file_leaves_its_rows_unknown_and_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{bad\n")
    facts = data_facts(tmp_path / "a.jsonl", 5, None)
    assert "columns" not in facts and "size" in facts
    assert data_facts(tmp_path / "gone", 5, None) == {}


def test_rows_longer_than_the_limit_are_counted_in_the_models_own_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    short, long = {"prompt": "a", "completion": "b"}, {"prompt": "a " * 200, "completion": "b"}
    facts = data_facts(
        rows(tmp_path / "a.jsonl", short, short, short, long), 50, FIXTURES / "tiny-llama"
    )
    assert (
        facts["truncated"] == 25.0 and isinstance(facts["longest"], int) and facts["longest"] > 150
    )
    assert "truncated" not in data_facts(tmp_path / "a.jsonl", 50, tmp_path), (
        "without a tokenizer it is not known"
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "a " * 200, "topic": "a " * 900}
    facts = data_facts(rows(tmp_path / "c.jsonl", pair), 50, FIXTURES / "tiny-llama")
    assert (
        facts["truncated"] == 100.0 and isinstance(facts["longest"], int) and facts["longest"] < 450
    ), "an answer counts, a note does not"
    plain = rows(tmp_path / "b.jsonl", {"text": "a " * 500})
    assert data_facts(plain, 50, FIXTURES / "tiny-llama")["truncated"] == 0.0, (
        "plain text is cut in pieces"
    )


def test_heads_of_images_tell_what_trainers_mind(tmp_path: Path) -> None:
    for name, kind in (("a.png", 2), ("b.png", 6), ("c.png", 2)):
        png(tmp_path / name, kind)
    (tmp_path / "c.webp").write_bytes(b"RIFF")
    (tmp_path / "a.txt").write_text("a caption")
    facts = data_facts(tmp_path, None, None)
    assert (
        facts["images"],
        facts["captions_missing"],
        facts["alpha"],
        facts["odd_formats"],
        facts["stems_twice"],
    ) == (4, 3, 1, 1, 1)
    (tmp_path / "metadata.jsonl").write_text("")
    assert data_facts(tmp_path, None, None)["captions_missing"] == 0


def test_a_lock_says_what_will_be_there_and_what_torch_was_built_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "torch==2.13.0+cu128 \\\n    --hash=sha256:00\nflash-attn==2.8.3\nTRL[x]==1.16.0 ; python_version > '3'\n# numpy==1\n"
    )
    facts = read_lock(lock)
    assert facts == {"torch": [2, 13, 0], "flash_attn": [2, 8, 3], "trl": [1, 16, 0], "cuda": 12.8}
    lock.write_text("torch==2.13.0\nnvidia-cuda-runtime-cu12==12.6.77\n")
    assert read_lock(lock)["cuda"] == 12.6
    toml = tmp_path / "pylock.toml"
    toml.write_text('[[packages]]\nname = "torch"\nversion = "2.13.0"\n')
    assert read_lock(toml) == {"torch": [2, 13, 0], "cuda": None}


SAID = b"""\
root=/r
cpus=8
memory=67000000000
disk=50000000000
gpu=NVIDIA GeForce RTX 4090, 24564
gpu=NVIDIA GeForce RTX 4090, 24564
shm=67108864
capability=8.9
gpu_driver=535.161.08
cuda=12.2
"""


def test_a_hosts_answer_is_read_into_numbers() -> None:
    facts = host_facts("box", SAID)
    assert facts == {
        "name": "box", "gpus": 2, "gpu": "NVIDIA GeForce RTX 4090", "memory": 67.0, "disk": 50.0, "gpu_memory": 25.757, "shm": 0.067,
        "capability": 8.9, "cuda": 12.2, "driver": [535, 161, 8], "rented": None, "auto_tmux": False,
    }  # fmt: skip


def test_a_host_that_says_nonsense_is_unknown_where_it_does() -> None:
    facts = host_facts(
        "box", b"shm=lots\ncapability=[N/A]\ncuda=\ngpu_driver=none\nmemory=-1\n\xff\xfe\n"
    )
    assert facts == {"name": "box", "gpus": 0, "gpu": None, "rented": None, "auto_tmux": False}


@pytest.mark.parametrize(
    ("name", "said", "offer"),
    [
        ("box", b"", (None, None, None)),
        ("box", b"rented=vast\n", ("vast", "direct", True)),
        ("box", b"rented=vast\nno_tmux=yes\n", ("vast", "direct", False)),
        ("root@ssh5.vast.ai:12345", b"", ("vast", "direct", True)),
        ("abc-64410@ssh.runpod.io", b"", ("runpod", "proxy", False)),
        ("root@1.2.3.4:10022", b"rented=runpod\n", ("runpod", "direct", False)),
        ("box", b"rented=nobody\n", (None, None, None)),
    ],
)
def test_a_machine_tells_who_rents_it_out(
    name: str, said: bytes, offer: tuple[object, ...]
) -> None:
    known = machine.offer(RuleFacts(host_facts(name, said), "x"))
    assert tuple(known[each] for each in ("provider", "ssh", "auto_tmux")) == offer
    assert ("hours_left" in known) == (offer[0] is None), (
        "how long it may be had, only its provider knows"
    )
