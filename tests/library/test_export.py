"""`export@1`: what is merged is the model that was trained, what does not belong together is refused by name, and a GGUF file is read back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import runner
from tests.library.siblings import siblings
from tests.library.smoke import smoke
from tests.tools import llama_cpp

ROOT = Path(__file__).resolve().parents[2]
ADAPTER, BASE = ROOT / "fixtures" / "tiny-adapter", ROOT / "fixtures" / "tiny-llama"


@pytest.fixture(scope="module")
def programs() -> Iterator[Any]:
    with siblings():
        import export_gguf  # type: ignore[import-not-found]
        import export_merge  # type: ignore[import-not-found]
        import model_folder  # type: ignore[import-not-found]

        class Programs:
            gguf, merge, folder = export_gguf, export_merge, model_folder

        yield Programs


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as others make them: without the record of a training of ours, and naming its base."""
    folder = tmp_path / "tuned"
    shutil.copytree(ADAPTER, folder)
    (folder / "training.json").unlink()
    change(folder / "adapter_config.json", base_model_name_or_path="acme/tiny")
    return folder


@pytest.fixture(scope="module")
def drawn(programs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with weights, as the Hub would have it."""
    folder = tmp_path_factory.mktemp("hub") / "base"
    shutil.copytree(BASE, folder)
    programs.folder.load(programs.folder.read(BASE, None), "no", init="random").save_pretrained(
        folder
    )
    (folder / ".origin.json").write_text(json.dumps({"repo": "acme/tiny", "revision": "ab" * 20}))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def run(monkeypatch: pytest.MonkeyPatch, main: Any, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *map(str, words)])
    main()


def test_what_is_merged_gives_the_logits_of_the_adapter_on_its_base(
    programs: Any, adapter: Path, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [
        "--model",
        adapter,
        "--base",
        drawn,
        "--precision",
        "auto",
        "--shard-size",
        "200KB",
        "--recipe",
        "export@1",
    ]
    run(
        monkeypatch,
        programs.merge.main,
        *words,
        "--out",
        tmp_path / "model",
        "--report",
        tmp_path / "merge.json",
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    apart: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(drawn, local_files_only=True), str(adapter)
    ).eval()
    ids = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)(
        "The assert statement in Python", return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        one, other = merged(input_ids=ids).logits, apart(input_ids=ids).logits
        with apart.disable_adapter():
            alone = apart(input_ids=ids).logits
    assert (
        float((one - other).abs().max() / other.std()) < 1e-4
        and float((one - alone).abs().max() / other.std()) > 0.5
    )
    told = json.loads((tmp_path / "merge.json").read_text())
    assert (
        len(list((tmp_path / "model").glob("*.safetensors"))) == told["shards"] > 1
        and told["difference"] < told["tolerance"] == 1e-3
    )
    card = (tmp_path / "model" / "README.md").read_text()
    header = yaml.safe_load(card.split("---\n")[1])
    assert (
        (header["base_model"], header["license"]) == ("acme/tiny", "mit")
        and "`export@1`" in card
        and "training.json" not in card
    )


def test_weights_are_written_in_the_precision_that_is_asked_for(
    programs: Any, adapter: Path, drawn: Path, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    told = programs.merge.export(
        programs.folder.read(adapter, drawn), "bf16", "5GB", tmp_path / "model"
    )
    assert {
        weight.dtype for weight in load_file(tmp_path / "model" / "model.safetensors").values()
    } == {torch.bfloat16}
    assert 1e-4 < told["difference"] < told["tolerance"] == 0.3 and told["effect"] > 0.5


def test_an_adapter_that_rounding_swallows_is_reported(
    programs: Any,
    adapter: Path,
    drawn: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(adapter / "adapter_config.json", lora_alpha=0.01)
    words = [
        "--model",
        adapter,
        "--base",
        drawn,
        "--shard-size",
        "5GB",
        "--recipe",
        "export@1",
        "--out",
        tmp_path / "model",
        "--report",
        tmp_path / "r",
    ]
    for precision, told in (("bf16", True), ("no", False)):
        run(monkeypatch, programs.merge.main, *words, "--precision", precision)
        assert (
            "rounding loses much of it; precision=no merges in 32 bits" in capsys.readouterr().out
        ) is told


def test_what_is_too_far_from_the_model_that_was_trained_is_no_export(
    programs: Any, adapter: Path, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel

    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    with pytest.raises(programs.folder.Unfit, match="the logits of what was written differ"):
        programs.merge.export(programs.folder.read(adapter, drawn), "no", "5GB", tmp_path / "model")


def drawn_on(folder: Path, kind: str, targets: list[str], **config: Any) -> tuple[Path, Path]:
    """A tiny model of a kind, and an adapter on the modules that are named, none of whose weights is zero."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shutil.copytree(BASE, folder / "base")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](vocab_size=1024, eos_token_id=0, **config)
    )
    base.save_pretrained(folder / "base")
    adapted = get_peft_model(
        base,
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, init_lora_weights=False),
    )
    adapted.save_pretrained(str(folder / "adapter"))
    return folder / "base", folder / "adapter"


def test_an_adapter_fits_a_base_that_keeps_its_weights_the_other_way_round(
    programs: Any, tmp_path: Path
) -> None:
    base, adapter = drawn_on(
        tmp_path,
        "gpt2",
        ["c_attn", "c_fc"],
        bos_token_id=0,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
    )
    folder = programs.folder.read(adapter, base)
    told = programs.merge.export(folder, "no", "5GB", tmp_path / "model")
    assert told["difference"] < 1e-4 < told["effect"]
    change(base / "config.json", n_embd=16)
    with pytest.raises(programs.folder.Unfit, match="c_attn has 48 there and 96 in the adapter"):
        programs.folder.read(adapter, base)


def test_what_no_merged_model_can_be_is_said_and_no_other_precision_proposed(
    programs: Any, tmp_path: Path
) -> None:
    base, adapter = drawn_on(
        tmp_path, "llama", ["lm_head"], tie_word_embeddings=True, hidden_size=32,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
    )  # fmt: skip
    with pytest.raises(programs.folder.Unfit) as refused:
        programs.merge.export(programs.folder.read(adapter, base), "no", "5GB", tmp_path / "model")
    assert "one matrix for embed_tokens and lm_head" in str(refused.value)
    assert "precision=no" not in str(refused.value)


def test_the_token_at_which_a_model_was_taught_to_stop_is_that_of_the_export(
    programs: Any, adapter: Path, drawn: Path, tmp_path: Path
) -> None:
    (adapter / "training.json").write_text(
        json.dumps(
            {"init": "pretrained", "seed": 0, "end_token": {"text": "<|im_end|>", "number": 2}}
        )
    )
    programs.merge.export(programs.folder.read(adapter, drawn), "no", "5GB", tmp_path / "model")
    assert (
        json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 2
    )
    assert (
        json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["eos_token"]
        == "<|im_end|>"
    )


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [
    (
        "without its base",
        {},
        None,
        "tuned is an adapter: give the model that it belongs to, base=acme/tiny",
    ),
    (
        "of another width",
        {},
        {"hidden_size": 128},
        r"tuned does not belong to other: lm_head has 128 there and 64 in the adapter; .* It was made for acme/tiny",
    ),
    ("of more layers", {}, {"num_hidden_layers": 1}, r"it has no model\.layers\.1\."),
    (
        "of another vocabulary",
        {},
        {"vocab_size": 2048},
        "lm_head has 2048 there and 1024 in the adapter",
    ),
    (
        "beside 4 bits",
        {},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        r"other is quantised \(bitsandbytes\): .*give the base in 16 bits",
    ),
    (
        "that changes no weight",
        {"peft_type": "PREFIX_TUNING"},
        {},
        "of peft's kind PREFIX_TUNING, which changes no weight",
    ),
    (
        "of a judge",
        {"task_type": "SEQ_CLS"},
        {},
        "an adapter for SEQ_CLS, which writes no text; reward@1 with export=merged",
    ),
]


@pytest.mark.parametrize(
    ("settings", "base", "said"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_an_adapter_is_refused_by_name(
    settings: dict[str, Any],
    base: dict[str, Any] | None,
    said: str,
    programs: Any,
    adapter: Path,
    drawn: Path,
    tmp_path: Path,
) -> None:
    change(adapter / "adapter_config.json", **settings)
    other = tmp_path / "other"
    shutil.copytree(drawn, other)
    change(other / "config.json", **(base or {}))
    with pytest.raises(programs.folder.Unfit, match=said):
        programs.folder.mergeable(programs.folder.read(adapter, None if base is None else other))


def test_what_is_no_model_is_refused_by_name(programs: Any, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(
        programs.folder.Unfit,
        match=r"is no model folder: it holds neither config\.json nor adapter_config\.json",
    ):
        programs.folder.read(tmp_path, None)
    with pytest.raises(
        programs.folder.Unfit,
        match=r"tiny-llama holds no weights .*: it cannot be the base of tuned",
    ):
        programs.folder.read(adapter, BASE)


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        (
            "NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()\n",
            "llama.cpp does not know this tokenizer",
        ),
        (
            "ERROR:hf-to-gguf:Model NoSuchForCausalLM is not supported\n",
            "llama.cpp has no such architecture at the commit that this recipe pins",
        ),
        ("OSError: the disk is full\n", r"what it said stands above \(OSError: the disk is full\)"),
    ],
)
def test_what_the_converter_complains_of_is_said_in_plain_words(
    said: str, meaning: str, programs: Any
) -> None:
    import re

    assert re.search(meaning, programs.gguf.why(said, 1))


def test_a_gguf_file_that_is_not_the_model_is_found(programs: Any) -> None:
    told = {
        "architecture": "llama",
        "metadata": {"llama.block_count": 2, "llama.embedding_length": 64},
    }
    assert (
        programs.gguf.compare(
            told, {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
        )
        == []
    )
    assert programs.gguf.compare(told, {"text_config": {"num_hidden_layers": 3}}) == [
        "3 layers in config.json, 2 in the file"
    ]


def test_the_converter_knows_each_word_that_it_is_given(programs: Any) -> None:
    """Read off its source: to start it takes torch."""
    script = (llama_cpp() / "convert_hf_to_gguf.py").read_text()
    words = programs.gguf.command(
        Path("convert_hf_to_gguf.py"), Path("model"), Path("file.gguf"), "q8_0", "name"
    )
    assert all(f'"{word}"' in script for word in words if word.startswith("--"))
    kinds = yaml.safe_load((ROOT / "recipes" / "export@1.yaml").read_text())["inputs"]["gguf"][
        "choices"
    ]
    (taken,) = [line for line in script.splitlines() if '"--outtype"' in line]
    assert all(f'"{kind}"' in taken for kind in kinds if kind != "none")


@pytest.mark.proof
def test_the_smoke_preset_merges_and_converts_nothing(tmp_path: Path) -> None:
    results = smoke("export@1", tmp_path)
    assert (
        json.loads((results / "merge.json").read_text())["difference"] < 1e-4
        and len(list((results / "model").glob("*.safetensors"))) == 4
    )
    assert not (results / "gguf").exists()


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_tiny_llama_becomes_a_gguf_file_of_the_same_weights(kind: str, tmp_path: Path) -> None:
    """By the recipe itself, its converter checked out by git: from a repository here, since tests have no network."""
    import torch
    from gguf import GGUFReader, dequantize  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    model = byte_llama(tmp_path / "byte")
    space = tmp_path / "space"
    for name in ("trainers", "locks"):
        shutil.copytree(ROOT / "recipes" / name, space / name)
    pinned = yaml.safe_load((ROOT / "recipes" / "export@1.yaml").read_text())
    pinned["resources"] = {"gpus": 0}
    pinned["steps"]["gguf"]["code"][1] |= checkout(llama_cpp(), tmp_path / "llama.cpp")
    recipe = space / "export@1.yaml"
    recipe.write_text(yaml.safe_dump(pinned, sort_keys=False))
    inputs = {"model": str(model), "gguf": kind, "name": "byte"}
    summary = runner.run(str(recipe), inputs, python="current", workspace=space)
    assert summary.state == "COMPLETED", [
        (failure.id, failure.tail[-2000:]) for failure in summary.failed
    ]
    told = json.loads((space / "gguf.json").read_text())
    found = GGUFReader(str(space / "gguf" / f"byte-{kind}.gguf"))
    weights = load_file(model / "model.safetensors")
    assert (
        told["parameters"] == sum(weight.numel() for weight in weights.values())
        and told["vocabulary"] == 290
    )
    assert (
        told["metadata"]["general.name"] == "byte"
        and told["metadata"]["tokenizer.ggml.eos_token_id"] == 2
    )
    (up,) = [tensor for tensor in found.tensors if tensor.name == "blk.1.ffn_up.weight"]
    there = torch.from_numpy(dequantize(up.data, up.tensor_type).copy())
    step = {"f32": 0.0, "q8_0": 1 / 127}[kind]  # of the largest weight of a block of 32
    assert float(
        (there - weights["model.layers.1.mlp.up_proj.weight"]).abs().max()
    ) <= step * float(there.abs().max())


def byte_llama(folder: Path) -> Path:
    """A Llama with weights and a tokenizer that falls back to bytes, as Llama 2 has it: one that the converter takes without knowing its vocabulary."""
    import torch
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz",
        "▁t",
        "▁te",
        "st",
        "▁test",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", "t"), ("▁t", "e"), ("s", "t"), ("▁te", "st")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), bos_token_id=1, eos_token_id=2, **sizes)
    ).save_pretrained(folder)
    return folder


def checkout(llama: Path, repository: Path) -> dict[str, str]:
    """The converter as a commit of a repository here: what a recipe writes as `git` and `commit`."""
    repository.mkdir()
    for name in ("convert_hf_to_gguf.py", "conversion", "gguf-py"):
        (shutil.copytree if (llama / name).is_dir() else shutil.copyfile)(
            llama / name, repository / name
        )  # type: ignore[operator]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", repository, *words],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    git("init", "--quiet")
    git("add", "--all", "--force")
    git("commit", "--quiet", "-m", "converter")
    return {"git": str(repository), "commit": git("rev-parse", "HEAD")}
