"""Promise: every preflight rule fires on a real recipe, its files and its host, and is silent, not merely unasked, where what is wrong is put right.

And of mistakes as people make them `recipe check` finds each, and nothing in what they should have typed.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import runner
from runner.advice import preflight, rule_files
from runner.advice.facts import machine
from runner.advice.rules import RuleFindings
from runner.execution.terms import Settings
from runner.interface.cli.main import main
from runner.language import document
from runner.paths import shipped
from runner.storage.workspace import Workspace
from tests.servers.modelhub import modelhub
from tests.support import Space

HOME = shipped()
RULES = [rule.id for rule in rule_files.load().rules]
ONLY_ITS_PROVIDER_KNOWS = {"offer-ends-early", "secrets-on-strangers-machines"}
"""Rules about what no driver tells yet: until when a machine may be had, and whether its owner is known.  Judged in tests/unit/test_rules_judged.py."""

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA |= {
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
SEVEN = LLAMA | {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
}
SEVEN |= {"vocab_size": 152064}
SEVENTY = LLAMA | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}
TOKENS: dict[str, object] = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "</s>",
    "chat_template": "{{ bos_token }}{{ messages[0].content }}",
}
CHATML: dict[str, object] = {
    "bos_token": None,
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
}
CHATML |= {
    "added_tokens_decoder": {
        str(n): {"content": text}
        for n, text in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"))
    }
}
CHATML |= {
    "chat_template": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
}
MODELS: dict[str, dict[str, object]] = {
    "llama": {"config.json": LLAMA, "tokenizer_config.json": TOKENS},
    "hollow": {"config.json": LLAMA, "tokenizer_config.json": TOKENS},
    "mamba": {"config.json": LLAMA | {"model_type": "mamba"}, "tokenizer_config.json": TOKENS},
    "seven": {"config.json": SEVEN, "tokenizer_config.json": TOKENS},
    "seventy": {"config.json": SEVENTY, "tokenizer_config.json": TOKENS},
    "plain": {"config.json": LLAMA, "tokenizer_config.json": TOKENS | {"chat_template": None}},
    "twice": {"config.json": LLAMA, "tokenizer_config.json": TOKENS | {"add_bos_token": True}},
    "vision": {"config.json": LLAMA | {"vision_config": {}}, "tokenizer_config.json": TOKENS},
    "chat": {
        "config.json": LLAMA,
        "tokenizer_config.json": CHATML,
        "generation_config.json": {"eos_token_id": 0},
    },
    "instruct": {
        "config.json": LLAMA,
        "tokenizer_config.json": CHATML,
        "generation_config.json": {"eos_token_id": [2, 0]},
    },
    "gemma": {
        "config.json": LLAMA | {"model_type": "gemma3_text"},
        "tokenizer_config.json": TOKENS,
    },
    "flux": {"model_index.json": {"_class_name": "FluxPipeline"}},
    "sdxl": {"model_index.json": {"_class_name": "StableDiffusionXLPipeline"}},
}


@cache
def read(name: str) -> dict[str, dict[str, Any]]:
    value = document.read(HOME / "fixtures" / "gotchas" / name).value
    assert isinstance(value, dict)
    return value


def scenes() -> dict[str, dict[str, Any]]:
    return read("scenes.yaml")


def mistakes() -> dict[str, dict[str, Any]]:
    return read("mistakes.yaml")


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with modelhub() as address:
        yield address


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_every_rule_has_a_scene_that_fires_and_one_that_does_not() -> None:
    made = {each["finds"] for each in mistakes().values() if "finds" in each}
    assert set(scenes()) == set(RULES) - ONLY_ITS_PROVIDER_KNOWS - (made - set(scenes()))
    assert [
        id
        for id, scene in scenes().items()
        if not {"fires", "silent"} <= set(scene) or scene["fires"] == scene["silent"]
    ] == []


@pytest.mark.parametrize("id", scenes())
def test_the_rule_fires_where_it_should(
    id: str, tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = played(id, "fires", tmp_path, hub, monkeypatch)
    assert id in {finding.rule.id for finding in verdict.findings}, {
        each.rule.id: each.why for each in verdict.unchecked
    }.get(id, "silent")


@pytest.mark.parametrize("id", scenes())
def test_the_rule_was_asked_and_is_silent_where_it_should_be(
    id: str, tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = played(id, "silent", tmp_path, hub, monkeypatch)
    assert [finding.message for finding in verdict.findings if finding.rule.id == id] == []
    assert [each.why for each in verdict.unchecked if each.rule.id == id] == []


def test_each_mistake_says_where_people_met_it() -> None:
    assert len(mistakes()) >= 25
    assert [
        name
        for name, each in mistakes().items()
        if not each["source"] or not (each.get("finds") in RULES or each.get("says"))
    ] == []


@pytest.mark.parametrize("name", mistakes())
def test_a_mistake_is_found_and_nothing_in_what_should_have_been_typed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong, right = (
        checked(name, part, tmp_path / part, monkeypatch, capsys) for part in ("wrong", "right")
    )
    if (rule := mistakes()[name].get("finds")) is not None:
        assert rule in [each["code"] for each in json.loads(wrong)], wrong
        # Code that is not in the local cache yet is nobody's mistake.
        others = [each for each in json.loads(right) if each["code"] != "code-to-fetch"]
        assert [each["message"] for each in others if each["severity"] != "note"] == []
    else:
        words = mistakes()[name]["says"]
        assert words in wrong and words not in right and "no problems found, " in wrong


def test_a_run_of_a_part_is_refused_where_the_whole_would_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = HOME / "fixtures" / "tiny-sdxl"
    assert main(["run", "flux-lora", "--preset", "smoke", "--until", "text", f"base={base}"]) == 3
    assert (
        "is a StableDiffusionXLPipeline, and this recipe trains a FluxPipeline"
        in capsys.readouterr().err
    )


def checked(
    name: str,
    part: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What `recipe check` prints: findings as JSON, or the verdict where the mistake is known by its words.  On a machine that has all but a GPU."""
    whole = mistakes()[name]
    typed = whole[part] if isinstance(whole[part], dict) else {"check": whole[part]}
    scene = {**whole, **typed, "write": {**whole.get("write", {}), **typed.get("write", {})}}
    space = Space(root)
    files(space, scene)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(root))
    for variable in ("HF_TOKEN", "WANDB_API_KEY", "WANDB_MODE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(
        machine,
        "here",
        lambda _: machine.facts(
            "this machine", b"cpus=8\nmemory=256000000000\ndisk=2000000000000\nshm=64000000000"
        ),
    )
    code = main(
        ["check", *scene["check"].split(), *([] if "says" in whole else ["--format", "json"])]
    )
    printed = capsys.readouterr()
    assert code in (0, 3) and printed.out, printed.err
    return printed.out


def played(
    id: str, part: str, root: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> RuleFindings:
    """What `recipe check` finds in a scene."""
    whole = scenes()[id]
    scene = {
        **{key: value for key, value in whole.items() if key not in ("fires", "silent")},
        **whole[part],
    }
    scene["write"] = {**whole.get("write", {}), **whole[part].get("write", {})}
    space = Space(root / "space")
    files(space, scene)
    inputs = scene.get("inputs", {})
    if "hub" in scene:
        for name, value in {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": hub,
            "HF_TOKEN": scene["hub"],
        }.items():
            monkeypatch.setenv(name, value)
        told_address(monkeypatch, hub)
    recipe = scene.get("library") or "./recipe.yaml"
    if recipe.startswith("./"):
        space.recipe(recipe_of(scene))
    if "earlier" in scene:
        program(space.root / "trl", f"#!/bin/sh\n{scene['earlier']}\n")
        assert space.attempt(inputs, settings=Settings(allow=("all",))) == ["train"]
        if "again" in scene:
            space.recipe(recipe_of({**scene, "step": scene["again"]}))
    found = runner.plan(
        recipe,
        {**inputs, **scene.get("then", {})},
        workspace=space.root,
        python="current" if scene.get("current") else None,
    )
    host = machine.facts(
        scene.get("name", "box"), "\n".join(map(str, scene.get("host", ["cpus=2"]))).encode()
    )
    driver = "ssh" if "host" in scene else "local"
    with Workspace.open(space.root) as ws:
        return preflight.check(
            ws,
            found,
            range(len(found.plan.nodes)),
            driver=driver,
            host=host,
            python="current" if scene.get("current") else "",
        )


def recipe_of(scene: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of one step that keeps checkpoints."""
    step: dict[str, Any] = {
        "state": {"checkpoints": {"checkpoint": "checkpoint-*"}},
        "outputs": {"o": "o.txt"},
        "code": ["*.py", *(["trl"] if "earlier" in scene else [])],
    }
    step |= {key: scene[key] for key in ("run", "accelerate") if key in scene} | scene.get(
        "step", {}
    )
    inputs = {
        name: {"type": KINDS[type(value)], "default": value}
        for name, value in scene.get("inputs", {}).items()
    }
    if "continues" in scene:
        inputs[scene["continues"]]["continues"] = True
    python = {"python": {"lock": "lock.txt"}} if scene.get("lock") else {}
    return {
        "inputs": inputs,
        **python,
        "steps": {"train": {key: value for key, value in step.items() if value is not None}},
    }


KINDS: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def files(space: Space, scene: Mapping[str, Any]) -> None:
    space.write("train.py", "")
    for folder, model in [
        ("base", scene.get("model", "")),
        *((name, each["model"]) for name, each in scene["write"].items() if isinstance(each, dict)),
    ]:
        for name, content in MODELS.get(model, {}).items():
            space.write(f"{folder}/{name}", json.dumps(content))
        if model not in ("", "hollow"):
            space.write(f"{folder}/pytorch_model.bin", "")
    if scene.get("model") in ("llama", "seven", "gemma"):
        space.write(
            "base/tokenizer.json", (HOME / "fixtures" / "tiny-llama" / "tokenizer.json").read_text()
        )
    if "lock" in scene:
        space.write(
            "lock.txt", "".join(f"{line} --hash=sha256:{'0' * 64}\n" for line in scene["lock"])
        )
    if "rows" in scene:
        space.write(
            "rows.jsonl",
            "".join(
                json.dumps(
                    {
                        k: v * row.get("times", 1) if k in ("completion", "negative") else v
                        for k, v in row.items()
                    }
                )
                + "\n"
                for row in scene["rows"]
            ),
        )
    for name, content in scene["write"].items():
        if isinstance(content, dict):
            continue
        if isinstance(content, int):
            os.truncate(space.write(name, ""), content * 10**9)
        elif name.endswith(".png"):
            space.write(name, "").write_bytes(png(6 if content == "see-through" else 2))
        else:
            space.write(name, content)


def png(kind: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, kind, 0, 0, 0))
        + chunk(b"IEND", b"")
    )


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def told_address(monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    """The library of the Hub reads its environment once, at its import."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
