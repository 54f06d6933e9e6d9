"""Checkpoint directories of a step, and selection of the checkpoint to resume from.

    states/<state key>/<generation>/made_under.json    `continues` values and process count
    states/<state key>/<generation>/<name>/            checkpoints in the trainer's own layout
    states/<state key>/holder                          last attempt, which may outlive its worker

A state key is a step's key without its `continues` values. An attempt uses the newest generation
with the same process count and no higher `continues` values, or a new generation. So a 2,000-step
checkpoint never counts as a 1,000-step checkpoint, and no generation is overwritten.
`checkpoint_files` examines the files, and `checkpoint_layouts` finds the trainer.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..digest import of_file, of_value
from ..planning.step import StepSpec
from ..reading import parse_json
from .checkpoint_files import flaw, read_shard_sizes
from .checkpoint_layouts import ENGINE, TEMPORARY, recognize_layout, shape, step_of
from .content.disk import below, delete

OURS = "checkpoint.json"
"""Name of the metadata file of this library's trainers.

It has the step, the settings, and the SHA-256 of each file.
"""
NOTHING: Mapping[str, Any] = {"continues": {}, "world": None, "id": ""}
"""Default metadata of a checkpoint directory."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Checkpoint directory of a step, as passed to an attempt.

    `id` is globally unique.
    """

    path: Path
    note: str  # reason for ignoring earlier checkpoints, or empty
    id: str = ""

    def folder(self, name: str) -> Path:
        return self.path / name


@dataclass(frozen=True, slots=True)
class CheckpointValidity:
    """Validity of a checkpoint, with its layout, step and process count."""

    ok: bool
    # transformers, accelerate, deepspeed, sharded, recipe (this library's trainers), file, files
    kind: str
    step: int | None = None
    processes: int | None = None  # processes that wrote it; None if unknown
    why: str = ""  # reason for rejection


@dataclass(frozen=True, slots=True)
class Newest:
    """Checkpoint to resume from, and the newer rejected checkpoints."""

    name: str | None = None
    verdict: CheckpointValidity | None = None
    passed: tuple[tuple[str, str], ...] = ()  # (name, reason) of each newer checkpoint

    @property
    def step(self) -> int | None:
        return self.verdict.step if self.verdict else None

    @property
    def words(self) -> str:
        """Message about the checkpoint for the user; empty without any checkpoint."""
        said = "; ".join(f"skipped {name}: {why}" for name, why in self.passed[:3])
        more = f"; and {len(self.passed) - 3} more" if len(self.passed) > 3 else ""
        if self.name is None:
            return f"NO USABLE CHECKPOINT, starting over: {said}{more}" if self.passed else ""
        at = ""
        # Most names have the step: checkpoint-500.
        if self.step is not None and str(self.step) not in re.findall(r"[1-9]\d*", self.name):
            at = f" (step {self.step})"
        skipped = f"; {said}{more}" if said else ""
        return f"resumes from {self.name}{at}{skipped}"


def key(spec: StepSpec, world: Sequence[Any], id: str) -> str:
    """Return the state key of a step, its directory name below `states/`.

    `world` is the content part of the step's cache key.
    """
    # A larger value of a `continues` input trains on from the same checkpoints.
    reads = {}
    for name, value in spec.author["reads"].items():
        if name.removeprefix("inputs.") not in spec.continues:
            reads[name] = value
    kept = {**spec.author, "reads": reads}
    # Outputs distinguish equal steps. Without outputs, the step's id does.
    own_id = "" if spec.author["outputs"] else id
    return of_value("state/1", [kept, sorted(world, key=str), own_id])[:32]


def made_under(root: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the newest checkpoint directory of a step and its metadata, or None.

    The metadata are the `continues` values and `world`.
    """
    newest = next((root / str(number) for number in _generations(root)), None)
    return (newest, of_generation(newest)) if newest is not None else None


def adopt(root: Path, made: Mapping[str, Any]) -> Path:
    """Return the local checkpoint directory for checkpoints from another machine.

    The directory is created if necessary.
    """
    numbers = _generations(root)
    for number in numbers:
        folder = root / str(number)
        if of_generation(folder)["id"] == made["id"]:
            return folder
    new = root / str(max(numbers, default=0) + 1)
    return _record(new, {**NOTHING, **made}, made["continues"], None, "").path


def choose(root: Path, continues: Mapping[str, Any], *, processes: int | None = None) -> Generation:
    """Select and record the checkpoint directory for an attempt.

    The attempt has these `continues` values and `processes` training processes.
    """
    path, note = choose_folder(root, continues, processes=processes)
    return _record(
        path, of_generation(path) if path.exists() else NOTHING, continues, processes, note
    )


def choose_folder(
    root: Path, continues: Mapping[str, Any], *, processes: int | None = None
) -> tuple[Path, str]:
    """Select the checkpoint directory for an attempt without recording it.

    Returns its directory, which may not exist, and the reason for ignoring earlier checkpoints.
    """
    note = ""
    generations = _generations(root)
    for number in generations:
        folder = root / str(number)
        made = of_generation(folder)
        by = made["world"]
        over = _values_over(made["continues"], continues)
        same_count = processes is None or by in (None, processes)
        if not over and same_count:
            if note:
                used = "using the earlier checkpoints" if _holds(folder) else "starting over"
                note = f"{note}; {used}"
            return folder, note
        if note or not _holds(folder):
            continue
        if over:
            reason = f"with {', '.join(over)}, more than requested now"
        else:
            reason = f"by {_processes(by)}, but this run has {_processes(processes)}"
        note = f"ignoring checkpoints that were trained {reason}"
    if note:
        note = f"{note}; starting over"
    last = generations[0] if generations else 0
    return root / str(last + 1), note


def _values_over(values: Mapping[str, Any], requested: Mapping[str, Any]) -> list[str]:
    """Return the `continues` values above the requested ones, as NAME=VALUE."""
    over = []
    for name, value in requested.items():
        if name in values and values[name] > value:
            over.append(f"{name}={values[name]}")
    return over


def _holds(generation: Path) -> bool:
    """Return True if a checkpoint directory contains files.

    Unfinished transfers from a host are in `.incoming` and do not count.
    """
    for folder in generation.iterdir():
        if not folder.is_dir() or folder.name == ".incoming":
            continue
        if any(folder.iterdir()):
            return True
    return False


def _generations(root: Path) -> list[int]:
    """Return the numbers of a step's checkpoint directories, highest first."""
    if not root.is_dir():
        return []
    names = [path.name for path in root.iterdir()]
    numbers = [int(name) for name in names if name.isascii() and name.isdecimal()]
    return sorted(numbers, reverse=True)


def holder(root: Path) -> str:
    """Return the name of the last attempt that used a checkpoint directory, or ""."""
    try:
        return (root / "holder").read_text()
    except FileNotFoundError:
        return ""


def hold(root: Path, attempt: str) -> None:
    temporary = root / "holder.new"
    temporary.write_text(attempt)
    temporary.rename(root / "holder")


def newest(
    folder: Path, pattern: str | None, *, processes: int | None = None, thorough: bool = True
) -> Newest:
    """Return the newest checkpoint that `processes` training processes can resume from.

    The number in its name counts first, then its time.

    With `thorough`, every file is read completely.
    """
    passed: list[tuple[str, str]] = []
    for name, verdict in judge_checkpoints(folder, pattern, processes=processes, thorough=thorough):
        if verdict.ok:
            return Newest(name, verdict, tuple(passed))
        passed.append((name, verdict.why))
    return Newest(passed=tuple(passed))


def judge_checkpoints(
    folder: Path, pattern: str | None, *, processes: int | None = None, thorough: bool = False
) -> Iterator[tuple[str, CheckpointValidity]]:
    """Yield every checkpoint in a directory with its validity, newest first.

    Each is examined on demand. Without a known layout, a checkpoint must have the same kinds of
    files as the previous one.
    """
    names = newest_first(folder, pattern)
    for name, before in zip_longest(names, names[1:]):
        verdict = examine(folder / name, processes=processes, thorough=thorough)
        if verdict.ok and before is not None:
            why = unlike(_files(folder / name), _files(folder / before), before, verdict)
            verdict = replace(verdict, ok=not why, why=why)
        yield name, verdict


def prune(folder: Path, pattern: str | None, keep: int | None) -> list[str]:
    """Delete all but the `keep` newest valid checkpoints, and return the deleted names.

    Do not call during training: an unfinished checkpoint may look complete. See
    `checkpoint_sync.CheckpointPruner`.
    """
    if keep is None or pattern is None:
        return []
    good: dict[int | None, list[str]] = {}
    for name, verdict in judge_checkpoints(folder, pattern):
        if verdict.ok:
            good.setdefault(verdict.processes, []).append(name)
    spared = {best(folder / names[0]) for names in good.values()}
    surplus: list[str] = []
    for names in good.values():
        surplus += [name for name in names[max(1, keep) :] if name not in spared]
    for name in surplus:
        delete(folder / name)
    return surplus


def examine(
    path: Path, *, processes: int | None = None, thorough: bool = False
) -> CheckpointValidity:
    """Check the validity of a checkpoint by its layout and, if given, its process count.

    With `thorough`, also verify all checksums. A vanished file counts as incomplete; raises
    nothing.
    """
    try:
        if path.is_file():
            verdict = _file(path, thorough=thorough)
        else:
            verdict = _folder(path, files(path), thorough=thorough)
    except OSError as error:
        verdict = CheckpointValidity(
            False, "files", step_of(path.name), None, f"cannot be read ({error.strerror})"
        )
    if verdict.ok and processes is not None and verdict.processes not in (None, processes):
        why = f"was saved by {_processes(verdict.processes)}, but this run has {_processes(processes)}: the weights would differ"
        verdict = replace(verdict, ok=False, why=why)
    return verdict


def unlike(
    names: Sequence[str], before: Sequence[str], called: str, verdict: CheckpointValidity
) -> str:
    """Describe a kind of file that the previous checkpoint has and this checkpoint lacks.

    Returns "" if none is missing, or if a layout defines the files.
    """
    lost = sorted(shape(before) - shape(names)) if verdict.kind == "files" else []
    return f"is incomplete: it has no {lost[0]}, unlike {called}" if lost else ""


def best(path: Path) -> str:
    """Return the name of the best checkpoint according to a transformers checkpoint, or ""."""
    try:
        return Path(
            str(
                parse_json((path / "trainer_state.json").read_bytes())["best_model_checkpoint"]
                or ""
            )
        ).name
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def went_back(restored: int | None, first: int | None) -> str:
    """Return a warning if a resumed training went back to an earlier step; otherwise "".

    It resumed from step `restored`, and first reported step `first`.

    The checkpoint's own step may be reported again: some trainers count from zero, and some
    evaluate first.
    """
    if restored is None or first is None or first >= restored:
        return ""
    return f"the training should resume from step {restored}, but its first report is of step {first}: it repeats finished steps"


def newest_first(folder: Path, pattern: str | None) -> Sequence[str]:
    """List the names of all checkpoints, complete or not, newest first.

    Symbolic links are ignored.
    """
    if pattern is None:
        return []
    try:
        listed = os.listdir(folder)
    except FileNotFoundError:
        return []
    names = []
    for name in listed:
        if not fnmatch.fnmatchcase(name, pattern) or TEMPORARY.match(name):
            continue
        if not (folder / name).is_symlink():
            names.append(name)
    return sorted(names, key=lambda name: (number(name), _time(folder / name), name), reverse=True)


def number(name: str) -> int:
    """Return the last number in a checkpoint's name, or -1."""
    digits = re.findall(r"\d+", name)
    return int(digits[-1]) if digits else -1


def is_due(name: str, copied: Iterable[str], steps: int | None) -> bool:
    """Return True if the checkpoint is at least `steps` steps away from each one in `copied`.

    The numbers in their names count.
    """
    ours = number(name)
    if steps is None or ours < 0:
        return True
    return all(abs(ours - number(each)) >= steps for each in copied)


def files(path: Path) -> list[str]:
    """List all files below a directory as sorted relative paths, including links."""
    start = len(str(path)) + 1
    names = [name[start:] for name, found in below(str(path)) if not stat.S_ISDIR(found.st_mode)]
    return sorted(names)


def _files(path: Path) -> list[str]:
    try:
        return files(path) if path.is_dir() else []
    except OSError:
        return []


def _time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _file(path: Path, *, thorough: bool) -> CheckpointValidity:
    wrong = flaw(path, thorough=thorough)
    if not wrong and not path.stat().st_size:
        wrong = "is empty"
    return CheckpointValidity(not wrong, "file", step_of(path.name), None, wrong and f"it {wrong}")


def _folder(path: Path, names: Sequence[str], *, thorough: bool) -> CheckpointValidity:
    if not names:
        return CheckpointValidity(False, "files", step_of(path.name), None, "is empty")
    found = recognize_layout(names, folder=path.name)
    wrong = (
        _why_unfinished(path.name, names)
        or _why_flawed(path, names, thorough=thorough)
        or _why_lacking(found.missing)
    )
    if not wrong and OURS in names:
        ours = _ours(path, names, thorough=thorough)
        if ours is not None:
            return ours
    is_trained = found.kind == "transformers" and not wrong
    step = _trained_steps(path) if is_trained else step_of(path.name)
    return CheckpointValidity(not wrong, found.kind, step, found.processes, wrong)


def _why_lacking(missing: Sequence[str]) -> str:
    """Describe missing files of a checkpoint, the first three by name; return "" if none."""
    if not missing:
        return ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"has no {', '.join(missing[:3])}{more}"


def _why_unfinished(own: str, names: Sequence[str]) -> str:
    for name in (own, *names):
        if any(TEMPORARY.match(part) for part in name.split("/")):
            return f"is incomplete: {name}"
    return ""


def _why_flawed(path: Path, names: Sequence[str], *, thorough: bool) -> str:
    for name in names:
        wrong = _why_file_flawed(path, name, names, thorough=thorough)
        if wrong:
            return wrong
    if "latest" in names and any(ENGINE.search(name) for name in names):
        return _why_latest_missing(path, names)
    return ""


def _why_file_flawed(path: Path, name: str, names: Sequence[str], *, thorough: bool) -> str:
    """Describe the damage of a checkpoint file, or a missing file that it lists; "" if none."""
    wrong = flaw(path / name, thorough=thorough)
    if wrong:
        return f"{name} {wrong}"
    if name.endswith(".index.json"):
        return _why_incomplete(path / name, name, names)
    if name.rpartition("/")[2] == ".metadata":
        return _why_cut_off(path, name, names)
    return ""


def _why_latest_missing(path: Path, names: Sequence[str]) -> str:
    """Describe a missing directory that DeepSpeed's file `latest` names; return "" if it exists."""
    named = (path / "latest").read_bytes()[:200].decode(errors="replace").strip()
    if any(name.startswith(f"{named}/") for name in names):
        return ""
    return f"has no {named or 'checkpoint'}, although its file `latest` names it"


def _why_cut_off(path: Path, metadata: str, names: Sequence[str]) -> str:
    """Describe truncated or missing shards of a torch distributed checkpoint; "" if none."""
    try:
        ends = read_shard_sizes(path / metadata)
    except (OSError, ValueError):
        return f"{metadata} is cut off"
    head = metadata[: -len(".metadata")]
    for shard, length in ends.items():
        if f"{head}{shard}" not in names:
            return f"has no {head}{shard}"
        if (path / f"{head}{shard}").stat().st_size < length:
            return f"{head}{shard} is cut off"
    return ""


def _why_incomplete(path: Path, name: str, names: Sequence[str]) -> str:
    """Describe a missing file that a safetensors or torch index lists; return "" if none."""
    try:
        index = parse_json(path.read_bytes())
        listed = sorted(set(map(str, index["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{name} lists no files"
    head = name[: len(name) - len(name.rpartition("/")[2])]
    for shard in listed:
        if f"{head}{shard}" not in names:
            return f"has no {head}{shard}, although {name} lists it"
    return ""


def _ours(path: Path, names: Sequence[str], *, thorough: bool) -> CheckpointValidity | None:
    """Return the validity of a checkpoint according to its own metadata file.

    Return None if that file is of another kind.
    """
    try:
        record = parse_json((path / OURS).read_bytes())
        listed = dict(record["files"])
        step, processes = int(record["step"]), record["settings"].get("world")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(processes, int):
        processes = None
    wrong = _find_wrong_file(path, listed, names, thorough=thorough)
    return CheckpointValidity(not wrong, "recipe", step, processes, wrong)


def _find_wrong_file(
    path: Path, listed: Mapping[str, str], names: Sequence[str], *, thorough: bool
) -> str:
    """Describe the first file that is missing, or that differs from its listed digest.

    Return "" if there is none. Digests are only compared if `thorough`.
    """
    for name in sorted(listed):
        if name not in names:
            return f"has no {name}"
    if thorough:
        for name in sorted(listed):
            if of_file(path / name) != listed[name]:
                return f"{name} changed after it was saved"
    return ""


def _trained_steps(path: Path) -> int | None:
    try:
        return int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return step_of(path.name)


def _processes(count: int | None) -> str:
    return f"{count} process" + ("" if count == 1 else "es")


def of_generation(path: Path) -> dict[str, Any]:
    """Read the metadata of a checkpoint directory: `continues` values, `world` and `id`."""
    try:
        found = parse_json((path / "made_under.json").read_text())
    except (OSError, ValueError):
        return dict(NOTHING)
    if not isinstance(found, dict):
        return dict(NOTHING)
    if isinstance(found.get("continues"), dict):
        return {**NOTHING, **found}
    return {**NOTHING, "continues": found}


def _record(
    path: Path,
    made: Mapping[str, Any],
    continues: Mapping[str, Any],
    processes: int | None,
    note: str,
) -> Generation:
    path.mkdir(parents=True, exist_ok=True)
    own = str(made["id"]) or secrets.token_hex(8)
    world = processes if processes is not None else made["world"]
    temporary = path / "made_under.json.new"
    temporary.write_text(json.dumps({"continues": dict(continues), "world": world, "id": own}))
    temporary.rename(path / "made_under.json")
    return Generation(path, note, own)
