"""`recipe config save | list | show | diff | restore`: manage named input sets in the workspace."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...api.differences import diff_mappings, without_files
from ...errors import CannotRun, Corrupt, Invalid, NotFound, Problem, did_you_mean
from ...language.library import find
from ...paths import beside
from ...storage.workspace import Workspace
from ...survey.plan_cache import as_stored, compile_request
from ..differences import all_of, as_json
from ..tables import align
from ..tail import safe_line
from .targets import format_time, open_for_reading, resolve_request

VERBS: Final = ("save", "list", "show", "diff", "restore")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SavedInputs(NamedTuple):
    """A named input set.  The recipe file and input paths are relative to the workspace."""

    name: str
    recipe: str
    inputs: Mapping[str, object]
    preset: str | None
    note: str
    saved: float  # seconds since the epoch

    @property
    def line(self) -> str:
        words = [self.recipe]
        if self.preset:
            words.append(f"--preset {self.preset}")
        words += [f"{name}={value}" for name, value in self.inputs.items()]
        return " ".join(words)


def run(args: argparse.Namespace) -> int:
    """Execute `recipe config` with one of VERBS.  Raises Invalid, NotFound, CannotRun."""
    words = list(args.words)
    least, most = {
        "save": (1, None),
        "list": (0, 0),
        "show": (1, 1),
        "diff": (2, 2),
        "restore": (1, 1),
    }[args.what]
    has_too_many = most is not None and len(words) > most
    if len(words) < least or has_too_many:
        known = {"save": "NAME, a recipe and inputs", "list": "no name", "diff": "two names"}
        message = f"config {args.what} takes {known.get(args.what, 'one name')}"
        raise Invalid([Problem("bad-input", message, fix="recipe config --help")])
    open_workspace = Workspace.open if args.what == "save" else open_for_reading
    with open_workspace(args.workspace) as ws:
        if args.what == "save":
            return _save(ws, args, words[0], words[1:])
        if args.what == "list":
            return _list(ws, args)
        found = [load(ws, name) for name in words]
        return {"show": _show, "diff": _diff, "restore": _restore}[args.what](args, found)


def _path(ws: Workspace, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    f'invalid name "{name}"',
                    fix="use at most 64 letters, digits, `.`, `_` and `-`",
                )
            ]
        )
    return ws.home / "saved" / f"{name}.json"


def load(ws: Workspace, name: str) -> SavedInputs:
    """Load a named input set.  Raises NotFound, Corrupt."""
    path = _path(ws, name)
    try:
        return SavedInputs(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        raise NotFound(
            f'no saved inputs "{name}"',
            fix=did_you_mean(name, _names(ws)) or "list the saved inputs with `recipe config list`",
        ) from None
    except (ValueError, TypeError):
        raise Corrupt(
            f"{path} is damaged", fix="remove the file, and save the inputs again"
        ) from None


def _names(ws: Workspace) -> list[str]:
    return sorted(path.stem for path in (ws.home / "saved").glob("*.json"))


def _save(ws: Workspace, args: argparse.Namespace, name: str, words: Sequence[str]) -> int:
    path = _path(ws, name)
    if path.exists() and not args.replace:
        raise CannotRun(
            f'saved inputs "{name}" already exist',
            fix="choose another name, or pass `--replace` to overwrite",
        )
    request = resolve_request(ws, argparse.Namespace(**{**vars(args), "words": words}))
    plan = compile_request(
        ws, find(request.recipe, ws.root), request, {}
    )  # raises Invalid for unknown inputs and invalid values
    kept = as_stored(ws, plan, request)
    saved = SavedInputs(
        name,
        kept.recipe,
        json.loads(json.dumps(dict(kept.inputs), default=str)),
        kept.preset,
        args.note,
        time.time(),
    )
    ws.write(path, json.dumps(saved._asdict(), indent=2).encode())
    if not args.quiet:
        print(safe_line(f"{name}: {saved.line}"))
    return 0


def _list(ws: Workspace, args: argparse.Namespace) -> int:
    found = [load(ws, name) for name in _names(ws)]
    if args.json:
        print(json.dumps([each._asdict() for each in found], indent=2))
    elif found:
        table = [("NAME", "SAVED", "WHAT", "NOTE")]
        for each in found:
            words, note = safe_line(each.line), safe_line(each.note)
            table.append((each.name, format_time(each.saved), words, note))
        print("\n".join(align(table, ())))
    elif not args.quiet:
        print("no saved inputs")
    return 0


def _show(args: argparse.Namespace, found: Sequence[SavedInputs]) -> int:
    each = found[0]
    if args.json:
        print(json.dumps(each._asdict(), indent=2))
        return 0
    print(safe_line(f"{each.name}  {each.recipe}  {format_time(each.saved)}"))
    for name, value in [("note", each.note), ("preset", each.preset), *each.inputs.items()]:
        if value not in ("", None):
            text = value if isinstance(value, str) else json.dumps(value)
            print(safe_line(f"{name}: {text}"))
    return 0


def _diff(args: argparse.Namespace, found: Sequence[SavedInputs]) -> int:
    a, b = ({"recipe": each.recipe, "preset": each.preset, **each.inputs} for each in found)
    changes = [without_files(change) for change in diff_mappings(a, b)]
    if args.json:
        print(json.dumps([as_json(change) for change in changes], indent=2))
    else:
        print("\n".join(all_of(changes, "")) or "no differences")
    return 0


def _restore(args: argparse.Namespace, found: Sequence[SavedInputs]) -> int:
    """Write the input values into a file and print the matching `recipe run` command."""
    each = found[0]
    target: Path = args.location.root / (args.output or f"{each.name}.json")
    data = json.dumps(dict(each.inputs), indent=2) + "\n"
    has_other_content = target.exists() and target.read_text("utf-8", "replace") != data
    if has_other_content and not args.replace:
        raise CannotRun(
            f"{beside(str(target))} already exists with other content",
            fix="choose another file with `-o FILE`, or pass `--replace`",
        )
    target.write_text(data, "utf-8")
    preset = f" --preset {each.preset}" if each.preset else ""
    print(safe_line(f"recipe run {each.recipe}{preset} -i {beside(str(target))}"))
    return 0
