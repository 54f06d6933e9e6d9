"""benchmarks/gpu.py goes on where it was ended, and leaves out what it cannot run.  Its programs are stood in for: the real ones take minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu

KILLED = "flux-lora/plain"


class Programs:
    """What the machine does when the benchmark starts a program: it answers at once, tells `lacking` packages, and can kill at one piece."""

    def __init__(self, lacking: str = "", kill: str = "") -> None:
        self.started: list[str] = []
        self._lacking, self.kill = lacking, kill

    def __call__(self, words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        program, said, code = words[1], "", 0
        if program == "-c":
            code = int(words[2] == f"import {self._lacking}")
            said = '{"gpu": null, "bytes": 0, "torch": "2", "transformers": "5"}'
        elif words[2] in ("make", "draw"):
            Path(words[3]).mkdir(parents=True)
            for name in ("whole", "work.json"):
                (Path(words[3]) / name).write_text("1")
        else:
            self.started.append(Path(program).stem)
            if self.kill and self.started[-1] == self.kill:
                self.kill = ""
                raise KeyboardInterrupt
            lines = [{"step": step, "time_step": 0.5, "memory_gb": 1.0} for step in range(1, 7)]
            Path(more["env"]["RECIPE_METRICS"]).write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
            said = json.dumps({"seconds": [0.25] * 5, "memory_gb": 2.0})
        return subprocess.CompletedProcess(words, code, said, "")


def options(tmp_path: Path, **more: Any) -> Namespace:
    usual = {"wheels": None, "device": "cpu", "tiny": True, "minutes": 8.0, "total": 25.0}
    return Namespace(state=tmp_path / "state.json", work=tmp_path / "work", **(usual | more))


def measured(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "state.json").read_text())["pieces"]
    return found


def test_a_killed_measurement_goes_on_with_the_piece_that_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(kill="plain_flux")
    monkeypatch.setattr(gpu.subprocess, "run", programs)
    with pytest.raises(KeyboardInterrupt):
        gpu.run(options(tmp_path))
    before = len(programs.started)
    assert (
        0 < before < len(gpu.PIECES)
        and KILLED in measured(tmp_path)
        and "seconds" not in measured(tmp_path)[KILLED]
    )
    gpu.run(options(tmp_path))
    assert (
        programs.started[before] == programs.started[before - 1] == "plain_flux"
        and len(programs.started) == len(gpu.PIECES) + 1
    )
    found = measured(tmp_path)
    assert (
        set(found) == set(gpu.NAMES)
        and found[KILLED]["images_per_second"] == 16
        and found["flux-lora/recipe"]["seconds"] == 0.5
    )
    assert "| flux-lora | 4 | 8 images/s | 16 images/s | 0.50 |" in gpu.page(
        json.loads((tmp_path / "state.json").read_text())
    )


def test_a_row_without_its_package_says_that_it_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.subprocess, "run", Programs(lacking="bitsandbytes"))
    gpu.run(options(tmp_path))
    left_out = {
        name
        for name, piece in measured(tmp_path).items()
        if piece.get("not_run") == "not run: no bitsandbytes"
    }
    assert (
        left_out == {name for name in gpu.NAMES if "qlora" in name.lower()} and len(left_out) == 3
    )
    assert "| sft QLoRA, 7B | | not run: no bitsandbytes |" in gpu.page(
        json.loads((tmp_path / "state.json").read_text())
    )


def test_no_piece_begins_that_the_time_is_too_short_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = Programs()
    monkeypatch.setattr(gpu.subprocess, "run", programs)
    gpu.run(options(tmp_path, tiny=False, minutes=2))
    assert not programs.started and "the same command goes on" in capsys.readouterr().out
    gpu.run(options(tmp_path, tiny=False, total=2))
    assert not programs.started and {piece["not_run"] for piece in measured(tmp_path).values()} == {
        "not run: the time was over"
    }


def test_a_training_that_fills_the_card_is_halved_where_it_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs()

    def full(words: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if "--micro-batch" in words and int(words[words.index("--micro-batch") + 1]) > 1:
            return subprocess.CompletedProcess(
                words, 1, "", "torch.OutOfMemoryError: CUDA out of memory"
            )
        return programs(words, **more)

    monkeypatch.setattr(gpu.subprocess, "run", full)
    gpu.run(options(tmp_path))
    found = measured(tmp_path)
    assert (
        found["sft LoRA, 7B/recipe"]["micro_batch"]
        == found["sft LoRA, 7B/plain"]["micro_batch"]
        == 1
        and "seconds" in found["sft LoRA, 7B/plain"]
    )
    assert found["flux-lora, preset 80gb/recipe"]["not_run"] == "out of memory at 4 at once"


def test_wheels_are_laid_out_only_of_packages_that_are_not_there(tmp_path: Path) -> None:
    for name, module in (
        ("torch-1-py3-none-any", "torch"),
        ("other-1-py3-none-any", "nobody_has_this"),
        ("far-1-cp27-cp27-any", "nor_this"),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w", zipfile.ZIP_LZMA) as wheel:
            wheel.writestr(f"{module}/__init__.py", "")
    found = gpu.unpacked(tmp_path, tmp_path / "work")
    assert [folder.name for folder in found.iterdir() if folder.is_dir()] == ["nobody_has_this"]


def test_what_is_given_to_the_trainers_are_options_that_they_have(tmp_path: Path) -> None:
    for row in gpu.ROWS:
        inputs = gpu.Machine.inputs(Namespace(_tiny=False, _most=lambda *_: 3), row, None)  # type: ignore[arg-type]
        for who in (gpu.OURS, gpu.PLAIN):
            program, *words = map(str, gpu._command(row, who, inputs, tmp_path, tmp_path, tmp_path))
            source = (
                "".join(
                    (gpu.TRAINERS / name).read_text()
                    for name in ("trl_common.py", "descent.py", "adapters.py")
                )
                + Path(program).read_text()
            )
            assert [
                word
                for word in words
                if word.startswith("--") and word[2:] not in source and word not in source
            ] == []
            assert (inputs["global_batch"] % inputs["micro_batch"], inputs["precision"]) == (
                0,
                "bf16",
            ) and sys.executable not in program
