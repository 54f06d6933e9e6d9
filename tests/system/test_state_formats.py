"""Checkpoints as transformers, peft, accelerate and torch itself write them: whole ones count, and no short file is ever taken for a whole one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from runner.storage.checkpoints import examine, files
from tests.library import forks

pytestmark = pytest.mark.xdist_group("state-formats")

OFFSETS = int(os.environ.get("RECIPE_TRUNCATIONS", "8"))
"""Places at which each file is cut off."""
SAVE = """
import pathlib, sys
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.distributed import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

out = pathlib.Path(sys.argv[1])
sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(4)]


def train(model, name):
    told = dict(save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no")
    Trainer(model, TrainingArguments(output_dir=str(out / name), max_steps=2, **told), train_dataset=rows).train()


model = LlamaForCausalLM(LlamaConfig(**sizes))
train(model, "transformers")
train(get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")), "peft")
model.save_pretrained(out / "split" / "step-2", max_shard_size="3KB")
accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
layer, optimizer, schedule = accelerator.prepare(layer, optimizer, schedule)
layer(torch.ones(4)).sum().backward()
optimizer.step()
accelerator.save_state(str(out / "accelerate" / "step-2"))
accelerator.save_state(str(out / "pickled" / "step-2"), safe_serialization=False)
checkpoint.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(out / "sharded" / "step-2"), no_dist=True)
torch.serialization.set_crc32_options(False)
(out / "unsummed" / "step-2").mkdir(parents=True)
torch.save(layer.state_dict(), out / "unsummed" / "step-2" / "layer.pt")
"""
KINDS = {
    "transformers": ("transformers/checkpoint-2", 1),
    "peft": ("peft/checkpoint-2", 1),
    "split": ("split/step-2", None),
    "accelerate": ("accelerate/step-2", 1),
    "pickled": ("pickled/step-2", 1),
    "sharded": ("sharded/step-2", 1),
    "unsummed": ("unsummed/step-2", None),
}
NAMED = {"split": "files", "peft": "transformers", "pickled": "accelerate", "unsummed": "files"}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved")
    program = tmp_path_factory.mktemp("program") / "save.py"
    program.write_text(SAVE)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = forks.run([sys.executable, str(program), str(out)], env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> Path:
    """A copy that may be spoiled."""
    source = saved / KINDS[request.param][0]
    return Path(shutil.copytree(source, tmp_path / source.name))


@pytest.mark.parametrize("kind", KINDS)
def test_what_they_save_is_whole_and_distinct(kind: str, saved: Path) -> None:
    name, world = KINDS[kind]
    verdict = examine(saved / name, thorough=True)
    assert (verdict.ok, verdict.why, verdict.kind, verdict.step, verdict.processes) == (
        True,
        "",
        NAMED.get(kind, kind),
        2,
        world,
    )


@pytest.mark.longer
def test_no_file_cut_off_anywhere_is_taken_for_a_whole_one(checkpoint: Path) -> None:
    names = [name for name in files(checkpoint) if not name.endswith("README.md")]
    for name in names:
        path = checkpoint / name
        whole = path.read_bytes()
        for length in sorted(
            {*range(5), *range(0, len(whole), max(1, len(whole) // OFFSETS)), len(whole) - 1}
        ):
            path.write_bytes(whole[:length])
            # The newline at the end of a JSON file says nothing.
            assert not examine(checkpoint).ok or whole[:length] == whole.rstrip(), (
                name,
                length,
                len(whole),
            )
        path.write_bytes(whole)
        assert examine(checkpoint).ok


def test_no_file_filled_with_zeros_by_a_power_cut_is_taken_for_a_whole_one(
    checkpoint: Path,
) -> None:
    for name in files(checkpoint):
        if name.endswith("README.md"):
            continue
        path = checkpoint / name
        whole = path.read_bytes()
        for kept in (0, len(whole) // 2, len(whole) - min(len(whole), 100)):
            path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
            assert not examine(checkpoint, thorough=True).ok or (
                name.endswith(".safetensors") and kept
            ), (name, kept)
        path.write_bytes(whole)


def test_a_flipped_byte_in_what_torch_saved_is_found_by_its_checksum(
    saved: Path, tmp_path: Path
) -> None:
    path = (
        Path(shutil.copytree(saved / "transformers" / "checkpoint-2", tmp_path / "checkpoint-2"))
        / "optimizer.pt"
    )
    whole = path.read_bytes()
    at = whole.index(b"data.pkl") + 300
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert examine(path.parent).ok
    assert (
        examine(path.parent, thorough=True).why
        == "optimizer.pt is a zip archive with a damaged member"
    )


def test_a_file_that_is_gone_is_missed(checkpoint: Path) -> None:
    optional = {"README.md", "config.json", "generation_config.json", "scheduler.bin"}
    for name in files(checkpoint):
        held = (checkpoint / name).rename(checkpoint.parent / "held")
        assert not examine(checkpoint).ok or name in optional, name
        held.rename(checkpoint / name)
