"""Which generation of a state counts, which checkpoint is whole, what is pruned."""

from __future__ import annotations

import json
from pathlib import Path

from runner.execution.checkpoints import choose, examine, latest, prune


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_text("x")
    return folder


def safetensors(path: Path, *, cut: int = 0) -> Path:
    head = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(head).to_bytes(8, "little") + head + bytes(8)
    path.write_bytes(whole[: len(whole) - cut])
    return path


def test_the_newest_checkpoint_is_the_one_with_the_greatest_number(tmp_path: Path) -> None:
    assert latest(made(tmp_path, "step-9", "step-10", "other"), "step-*") == "step-10"


def test_a_checkpoint_without_files_or_with_a_short_tensor_file_is_not_whole(tmp_path: Path) -> None:
    folder = made(tmp_path, "step-1", "step-2", "step-3")
    (folder / "step-3" / "weights").unlink()
    safetensors(folder / "step-2" / "model.safetensors", cut=1)
    assert latest(folder, "step-*") == "step-1"
    assert examine(safetensors(tmp_path / "good.safetensors")).ok


def test_pruning_keeps_the_newest_whole_ones_and_whatever_is_not_a_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path, "step-1", "step-2", "step-3", "logs")
    (folder / "step-3" / "weights").unlink()
    assert prune(folder, "step-*", 1) == ["step-1"]
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "step-2", "step-3"]


def test_a_generation_made_under_more_is_not_taken_for_less_and_is_not_lost(tmp_path: Path) -> None:
    first = choose(tmp_path, {"steps": 1000})
    assert choose(tmp_path, {"steps": 2000}).path == first.path
    fresh = choose(tmp_path, {"steps": 1000})
    assert fresh.path != first.path and "steps=2000" in fresh.note
    assert choose(tmp_path, {"steps": 1000}).path == fresh.path
    assert first.path.is_dir()
