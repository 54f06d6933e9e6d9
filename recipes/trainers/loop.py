"""What every training program here shares: who we are among the processes, checkpoints, metrics.  Does not know what is trained.

A checkpoint is a folder `step-000010`: safetensors and `checkpoint.json`, which names each file with its SHA-256.  It is written under another name,
synced, and renamed: it is complete or it is not there.  Nothing in it is a pickle, and the same training writes the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor

Settings = Mapping[str, object]


def start() -> Accelerator:
    """Join the other processes.  Ends with a message where not as many came up as were asked for."""
    # CUDA wants this before its first product, else no two runs are equal.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    asked = os.environ.get("RECIPE_WORLD_SIZE", "")
    if asked and int(asked) != accelerator.num_processes:
        fail(f"{asked} processes were asked for, {accelerator.num_processes} came up; `--cpu --num_processes 2` starts one, `--multi_gpu` starts two")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        fail("precision fp16 needs a GPU; on a CPU use bf16 or no")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Time spent to find programs that read what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return accelerator


def fail(message: str) -> NoReturn:
    """End with a message for people."""
    # torch's launcher says much about the death of a process, and at the end of it repeats what it finds in this file.
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}))
    sys.exit(f"train: {message}")


def needs(package: str, what: str, instead: str) -> None:
    """End with a message where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        fail(f"{what} needs {package}, which is not installed in this step's Python: pip install {package}, or {instead}")


def draw(*what: object) -> None:
    """Seed all randomness from `what`: nothing random needs to be saved, since each step draws from its own number."""
    import torch

    number = int.from_bytes(hashlib.sha256(":".join(map(str, what)).encode()).digest()[:8], "big") >> 1
    # Not torch.manual_seed, which keeps a traceback for each kind of device that was never used: half a millisecond, for each image of a step.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


class Checkpoints:
    """Saves and loads the state of one training."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder = folder
        self.settings = settings

    def save(self, step: int, tensors: Mapping[str, Tensor], history: list[str]) -> Path:
        """Write the checkpoint of `step`; it appears at once, whole."""
        from safetensors.torch import save_file

        name = f"step-{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f".{name}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, unfinished / "state.safetensors")
        (unfinished / "history.jsonl").write_text("".join(history))
        whole = {file.name: _sha256(file) for file in sorted(unfinished.iterdir())}
        record = {"format": 1, "step": step, "files": whole, "settings": self.settings}
        (unfinished / "checkpoint.json").write_text(json.dumps(record, indent=2) + "\n")
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        final = self.folder / name
        old = self.folder / f".{name}.old"
        if final.exists():
            # The same step, of a run that got further than where this one began.  Moved away whole: a kill must not leave half of it under its name.
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        unfinished.rename(final)
        _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def load(self, checkpoint: Path) -> tuple[int, dict[str, Tensor], list[str]]:
        """Step, tensors and history.  Ends with a message where it is damaged, or was made by another training than this one."""
        from safetensors.torch import load_file

        try:
            record = json.loads((checkpoint / "checkpoint.json").read_text())
            damaged = [name for name, digest in record["files"].items() if _sha256(checkpoint / name) != digest]
        except (OSError, ValueError, KeyError, TypeError) as error:
            fail(f"cannot resume from {checkpoint}: not a complete checkpoint: {error}")
        if damaged:
            fail(f"cannot resume from {checkpoint}: {', '.join(damaged)} is not as it was saved")
        made, now = record["settings"], self.settings
        if other := [f"{name} was {made.get(name)}, is {now.get(name)}" for name in sorted({*made, *now}) if made.get(name) != now.get(name)]:
            fail(f"cannot resume from {checkpoint}: it was made by another training: {'; '.join(other)}")
        return record["step"], load_file(checkpoint / "state.safetensors"), (checkpoint / "history.jsonl").read_text().splitlines(keepends=True)


class Metrics:
    """One JSON object a line at $RECIPE_METRICS.  Its readers follow it by offset: lines are only added, and no step is told twice."""

    def __init__(self, file: Path | None) -> None:
        self._told = 0
        self._file = None
        if file is None:
            return
        self._file = file.open("ab")
        data = file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        # A line cut off by the death of its writer was never told.
        self._file.truncate(len(whole))
        self._told = max((json.loads(line).get("step", 0) for line in whole.splitlines()), default=0)

    def tell(self, step: int, **values: float) -> None:
        if self._file is not None and step > self._told:
            self._file.write(json.dumps({"step": step, **values}).encode() + b"\n")
            self._file.flush()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
