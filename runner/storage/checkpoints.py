"""Where a step's state lives between attempts, and which of its checkpoints counts.

    states/<state key>/<generation>/made_under.json    the `continues` values and the number of processes that its checkpoints were made under
    states/<state key>/<generation>/<name>/            the state itself, the trainer's own layout
    states/<state key>/holder                          the name of the attempt that last had it, which may outlive its worker

A state key is a step's key without its `continues` values.  An attempt gets the newest generation made under values not above the asked ones and by
as many processes, else a new one: a 2,000-step checkpoint is never taken for a 1,000-step one, nor one of two processes for one of one, and neither
is lost.  `checkpoint_files` examines their files, `checkpoint_layouts` finds their trainer.
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
"""In a checkpoint of the trainers of this library: its step, its settings, and its files with their SHA-256."""
NOTHING: Mapping[str, Any] = {"continues": {}, "world": None, "id": ""}
"""What is known of a generation that says nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One state folder, as an attempt gets it.  `id` is its own, on every machine and for ever."""

    path: Path
    note: str  # why earlier state is not used, if so
    id: str = ""

    def folder(self, name: str) -> Path:
        return self.path / name


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a checkpoint is, and whether a training may resume from it."""

    ok: bool
    kind: str  # transformers, accelerate, deepspeed, sharded, recipe (this library's trainers), file, files
    step: int | None = None
    world: int | None = None  # processes that wrote it; None: its files do not tell
    why: str = ""  # why not, in words


@dataclass(frozen=True, slots=True)
class Newest:
    """The checkpoint that a training resumes from, and the newer ones that it cannot."""

    name: str | None = None
    verdict: Verdict | None = None
    passed: tuple[tuple[str, str], ...] = ()  # (name, why) of each newer one

    @property
    def step(self) -> int | None:
        return self.verdict.step if self.verdict else None

    @property
    def words(self) -> str:
        """What people have to know; empty when there is no checkpoint at all."""
        said = "; ".join(f"skipped {name}: {why}" for name, why in self.passed[:3])
        more = f"; and {len(self.passed) - 3} more" if len(self.passed) > 3 else ""
        if self.name is None:
            return f"NO USABLE CHECKPOINT, starting over: {said}{more}" if self.passed else ""
        at = (
            f" (step {self.step})"
            if self.step is not None and str(self.step) not in re.findall(r"[1-9]\d*", self.name)
            else ""
        )
        return f"resumes from {self.name}{at}" + (f"; {said}{more}" if said else "")


def key(spec: StepSpec, world: Sequence[Any], id: str) -> str:
    """The state key of a step, whose `world` is what its key was made from: the name of its folder below `states/`."""
    author, continues = spec.author, spec.continues
    kept = {
        **author,
        "reads": {
            k: v for k, v in author["reads"].items() if k.removeprefix("inputs.") not in continues
        },
    }
    return of_value("state/1", [kept, sorted(world, key=str), id if not author["outputs"] else ""])[
        :32
    ]


def made_under(root: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The newest generation of a state, and what its checkpoints were made under: `continues` values and `world`; None where there is none."""
    newest = next((root / str(number) for number in _generations(root)), None)
    return (newest, of_generation(newest)) if newest is not None else None


def adopt(root: Path, made: Mapping[str, Any]) -> Path:
    """The folder of a generation that was begun on another machine, made where there is none yet."""
    numbers = _generations(root)
    known = next(
        (
            root / str(number)
            for number in numbers
            if of_generation(root / str(number))["id"] == made["id"]
        ),
        None,
    )
    return (
        known
        or _record(
            root / str(max(numbers, default=0) + 1),
            {**NOTHING, **made},
            made["continues"],
            None,
            "",
        ).path
    )


def choose(root: Path, continues: Mapping[str, Any], *, world: int | None = None) -> Generation:
    """The generation for an attempt under these `continues` values, by `world` processes; recorded as made under them from now on."""
    path, note = choose_folder(root, continues, world=world)
    return _record(path, of_generation(path) if path.exists() else NOTHING, continues, world, note)


def choose_folder(
    root: Path, continues: Mapping[str, Any], *, world: int | None = None
) -> tuple[Path, str]:
    """The same without recording anything: the folder, which need not be there yet, and why earlier state is not used, if so."""
    note = ""
    generations = _generations(root)
    for number in generations:
        made = of_generation(root / str(number))
        values, by = made["continues"], made["world"]
        over = [
            f"{name}={values[name]}"
            for name, value in continues.items()
            if name in values and values[name] > value
        ]
        if not over and (world is None or by is None or by == world):
            return (
                root / str(number),
                note
                and f"{note}; {'using the earlier checkpoints' if _holds(root / str(number)) else 'starting over'}",
            )
        if note or not _holds(root / str(number)):
            continue
        reason = (
            f"with {', '.join(over)}, more than requested now"
            if over
            else f"by {_processes(by)}, but this run has {_processes(world)}"
        )
        note = f"ignoring checkpoints that were trained {reason}"
    return root / str((generations[0] if generations else 0) + 1), note and f"{note}; starting over"


def _holds(generation: Path) -> bool:
    """Whether an attempt left anything in it; what is still coming from a host is in `.incoming`."""
    return any(
        any(folder.iterdir())
        for folder in generation.iterdir()
        if folder.is_dir() and folder.name != ".incoming"
    )


def _generations(root: Path) -> list[int]:
    """The numbers of what a state has, the newest first."""
    return (
        sorted((int(path.name) for path in root.iterdir() if path.name.isdigit()), reverse=True)
        if root.is_dir()
        else []
    )


def holder(root: Path) -> str:
    """The attempt that last had this state; empty when none did."""
    try:
        return (root / "holder").read_text()
    except FileNotFoundError:
        return ""


def hold(root: Path, attempt: str) -> None:
    temporary = root / "holder.new"
    temporary.write_text(attempt)
    temporary.rename(root / "holder")


def newest(
    folder: Path, pattern: str | None, *, world: int | None = None, thorough: bool = True
) -> Newest:
    """The newest checkpoint that a training by `world` processes may resume from: by the number in its name, then by time.

    A `thorough` look reads it whole.
    """
    passed: list[tuple[str, str]] = []
    for name, verdict in judge_checkpoints(folder, pattern, world=world, thorough=thorough):
        if verdict.ok:
            return Newest(name, verdict, tuple(passed))
        passed.append((name, verdict.why))
    return Newest(passed=tuple(passed))


def judge_checkpoints(
    folder: Path, pattern: str | None, *, world: int | None = None, thorough: bool = False
) -> Iterator[tuple[str, Verdict]]:
    """Every checkpoint there with its verdict, the newest first, each examined when it is asked for.

    Where no layout says what belongs to a checkpoint, its trainer's habit does: it has to have what the one before it has.
    """
    names = newest_first(folder, pattern)
    for name, before in zip_longest(names, names[1:]):
        verdict = examine(folder / name, world=world, thorough=thorough)
        if verdict.ok and before is not None:
            why = unlike(_files(folder / name), _files(folder / before), before, verdict)
            verdict = replace(verdict, ok=not why, why=why)
        yield name, verdict


def prune(folder: Path, pattern: str | None, keep: int | None) -> list[str]:
    """Delete checkpoints beyond the `keep` newest whole ones; nothing else.  Returns the deleted names.

    Not while somebody writes there: one that is being written may look whole, see `checkpoint_sync.CheckpointPruner`.
    """
    if keep is None or pattern is None:
        return []
    good: dict[int | None, list[str]] = {}
    for name, verdict in judge_checkpoints(folder, pattern):
        if verdict.ok:
            good.setdefault(verdict.world, []).append(name)
    spared = {best(folder / names[0]) for names in good.values()}
    surplus = [
        name for names in good.values() for name in names[max(1, keep) :] if name not in spared
    ]
    for name in surplus:
        delete(folder / name)
    return surplus


def examine(path: Path, *, world: int | None = None, thorough: bool = False) -> Verdict:
    """Whether a checkpoint is whole, by its form and by what its trainer needs, and was made by as many processes as `world`, where that is asked.

    `thorough` also reads every checksum that there is.  What is gone meanwhile is not whole; raises nothing.
    """
    try:
        verdict = (
            _file(path, thorough=thorough)
            if path.is_file()
            else _folder(path, files(path), thorough=thorough)
        )
    except OSError as error:
        verdict = Verdict(
            False, "files", step_of(path.name), None, f"cannot be read ({error.strerror})"
        )
    if verdict.ok and world is not None and verdict.world not in (None, world):
        why = f"was saved by {_processes(verdict.world)}, but this run has {_processes(world)}: the weights would differ"
        verdict = replace(verdict, ok=False, why=why)
    return verdict


def unlike(names: Sequence[str], before: Sequence[str], called: str, verdict: Verdict) -> str:
    """Words for a file that the checkpoint before this one has and this one does not; empty where a layout says what belongs to it."""
    lost = sorted(shape(before) - shape(names)) if verdict.kind == "files" else []
    return f"is incomplete: it has no {lost[0]}, unlike {called}" if lost else ""


def best(path: Path) -> str:
    """The checkpoint that a transformers trainer will want again at its end, as this one says; empty when it says none."""
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
    """Whether a training that resumed from step `restored` reported `first` as its first step: words if it began before that, else empty.

    The step of the checkpoint itself may be reported again (some count from zero, some evaluate before they train); one before it may not.
    """
    if restored is None or first is None or first >= restored:
        return ""
    return f"the training should resume from step {restored}, but its first report is of step {first}: it repeats finished steps"


def newest_first(folder: Path, pattern: str | None) -> Sequence[str]:
    """The names of all checkpoints there, whole or not.  A link to one is none."""
    if pattern is None:
        return []
    try:
        names = [
            name
            for name in os.listdir(folder)
            if fnmatch.fnmatchcase(name, pattern) and not TEMPORARY.match(name)
        ]
    except FileNotFoundError:
        return []
    names = [name for name in names if not (folder / name).is_symlink()]
    return sorted(names, key=lambda name: (number(name), _time(folder / name), name), reverse=True)


def number(name: str) -> int:
    """The last number in a checkpoint's name, -1 without one."""
    digits = re.findall(r"\d+", name)
    return int(digits[-1]) if digits else -1


def is_due(name: str, copied: Iterable[str], steps: int | None) -> bool:
    """Whether a checkpoint is at least `steps` from each of those that are `copied`, by the numbers in their names."""
    ours = number(name)
    return steps is None or ours < 0 or all(abs(ours - number(each)) >= steps for each in copied)


def files(path: Path) -> list[str]:
    """Every file below a folder, as paths below it, sorted; links too, whatever they lead to."""
    return sorted(
        name[len(str(path)) + 1 :]
        for name, found in below(str(path))
        if not stat.S_ISDIR(found.st_mode)
    )


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


def _file(path: Path, *, thorough: bool) -> Verdict:
    wrong = flaw(path, thorough=thorough) or ("" if path.stat().st_size else "is empty")
    return Verdict(not wrong, "file", step_of(path.name), None, wrong and f"it {wrong}")


def _folder(path: Path, names: Sequence[str], *, thorough: bool) -> Verdict:
    if not names:
        return Verdict(False, "files", step_of(path.name), None, "is empty")
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
    return Verdict(not wrong, found.kind, step, found.world, wrong)


def _why_lacking(missing: Sequence[str]) -> str:
    """Which files are missing, the first three by name; empty if none are."""
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
        if wrong := flaw(path / name, thorough=thorough):
            return f"{name} {wrong}"
        if name.endswith(".index.json") and (wrong := _why_incomplete(path / name, name, names)):
            return wrong
        if name.rpartition("/")[2] == ".metadata" and (wrong := _why_cut_off(path, name, names)):
            return wrong
    if "latest" in names and any(ENGINE.search(name) for name in names):
        named = (path / "latest").read_bytes()[:200].decode(errors="replace").strip()
        if not any(name.startswith(f"{named}/") for name in names):
            return f"has no {named or 'checkpoint'}, although its file `latest` names it"
    return ""


def _why_cut_off(path: Path, metadata: str, names: Sequence[str]) -> str:
    """What is wrong with the shards that a `.metadata` of torch's distributed checkpoints names; empty if nothing is."""
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
    """A file that an index names and that is not there."""
    try:
        index = parse_json(path.read_bytes())
        listed = sorted(set(map(str, index["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{name} lists no files"
    head = name[: len(name) - len(name.rpartition("/")[2])]
    return next(
        (
            f"has no {head}{shard}, although {name} lists it"
            for shard in listed
            if f"{head}{shard}" not in names
        ),
        "",
    )


def _ours(path: Path, names: Sequence[str], *, thorough: bool) -> Verdict | None:
    """A checkpoint that says itself what belongs to it; None when it only has a file of that name."""
    try:
        record = parse_json((path / OURS).read_bytes())
        listed = dict(record["files"])
        step, world = int(record["step"]), record["settings"].get("world")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    wrong = next((f"has no {name}" for name in sorted(listed) if name not in names), "")
    if thorough and not wrong:
        wrong = next(
            (
                f"{name} changed after it was saved"
                for name in sorted(listed)
                if of_file(path / name) != listed[name]
            ),
            "",
        )
    return Verdict(not wrong, "recipe", step, world if isinstance(world, int) else None, wrong)


def _trained_steps(path: Path) -> int | None:
    try:
        return int(parse_json((path / "trainer_state.json").read_bytes())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return step_of(path.name)


def _processes(count: int | None) -> str:
    return f"{count} process" + ("" if count == 1 else "es")


def of_generation(path: Path) -> dict[str, Any]:
    """What a generation was made under: `continues` values, `world`, and its own `id`."""
    try:
        found = parse_json((path / "made_under.json").read_text())
    except (OSError, ValueError):
        return dict(NOTHING)
    if not isinstance(found, dict):
        return dict(NOTHING)
    return (
        {**NOTHING, **found}
        if isinstance(found.get("continues"), dict)
        else {**NOTHING, "continues": found}
    )


def _record(
    path: Path, made: Mapping[str, Any], continues: Mapping[str, Any], world: int | None, note: str
) -> Generation:
    path.mkdir(parents=True, exist_ok=True)
    own = str(made["id"]) or secrets.token_hex(8)
    temporary = path / "made_under.json.new"
    temporary.write_text(
        json.dumps(
            {
                "continues": dict(continues),
                "world": world if world is not None else made["world"],
                "id": own,
            }
        )
    )
    temporary.rename(path / "made_under.json")
    return Generation(path, note, own)
