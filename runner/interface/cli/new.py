"""`recipe new`: create a recipe from the template, a script or a library recipe.

This module chooses names and paths, and never replaces a file. The template is in
`recipes/scaffold/`.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CannotRun, Invalid, NotFound, Problem
from ...language import library
from ...paths import CallerLocation, shipped
from ...reading import whole
from ..pairs import parse_pairs
from .catalog import SCHEMA, write_schema

if TYPE_CHECKING:
    from ..drafting import RecipeDraft
    from ..script_hydra import HydraConfig
    from ..scripts import Script


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "path",
        metavar="NAME|PATH",
        help=(
            "Name of the recipe, or path of the file to create; an existing file is never replaced"
        ),
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="Training script to draft the recipe from; recipe reads the script without executing it",
    )
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="INPUT=VALUE",
        help="Input values that --gpu must not change, with --from",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RECIPE",
        help="Library recipe to adapt to the GPU named by --gpu",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="GPU to choose settings for, with --from, for example rtx4090 or h100-80gb",
    )
    parser.add_argument("--preset", metavar="NAME", help="Preset to start from, with --from")
    parser.epilog = "Examples:\n  recipe new words\n  recipe new mine --script train.py\n  recipe new mine --from sft@1 --gpu rtx4090"


def run(args: argparse.Namespace) -> int:
    path, name = _parse_target(args.path)
    shown = _show_path(path)
    if args.origin is not None or args.gpu is not None:
        files, next_words = _tailor(args, path, name)
    elif args.inputs or args.preset is not None:
        fix = "add --from RECIPE --gpu NAME"
        raise Invalid([Problem("bad-input", "inputs and --preset require --from", fix=fix)])
    elif args.script is not None:
        made = _draft_script(args.location, path, name, args.script)
        files = {path.name: made.text}
        next_words = _next_steps(shown, made)
    else:
        files = _scaffold(name, shown, _path_from_root(args.location, path.parent / name))
        next_words = [
            f"next: recipe run {shown} --preset smoke; then replace the example programs in {name}/"
        ]
    written = write(args.location, path, files)
    print(shown)
    if not args.quiet:
        print("\n".join([f"written: {', '.join(written)}", *next_words]), file=sys.stderr)
    return 0


def write(location: CallerLocation, path: Path, files: dict[str, str]) -> list[str]:
    """Create the recipe `path` and its other files, all or none, and return their paths to show.

    `files` maps paths relative to the recipe's directory to contents. A comment with the JSON
    Schema for editors is added at the top of the recipe.

    Raises NotFound if a file exists, CannotRun if a file cannot be written.
    """
    folder = (location.here / path).parent
    for file in files:
        if os.path.lexists(folder / file):
            raise NotFound(
                f"{_show_path(path.parent / file)} already exists and was not changed",
                fix="choose another name",
            )
    root = Path(os.path.abspath(location.root))
    home = Path(os.path.abspath(folder))
    base = root if home.is_relative_to(root) else home
    modeline = f"# yaml-language-server: $schema={os.path.relpath(base / SCHEMA, home)}\n"
    made: list[Path] = []
    try:
        for file, text in (files | {path.name: modeline + files[path.name]}).items():
            target = folder / file
            if target.parent != folder and not target.parent.exists():
                target.parent.mkdir()
                made.append(target.parent)
            with target.open("x", encoding="utf-8") as stream:
                made.append(target)
                stream.write(text)
        write_schema(base)
    except OSError as error:
        for target in reversed(made):
            if target.is_dir():
                target.rmdir()
            else:
                target.unlink()
        raise CannotRun(
            f"cannot write {_show_path(path)}: {error.strerror}",
            fix="choose an existing directory that you can write to",
        ) from error
    return [_show_path(path.parent / file) for file in files]


def _parse_target(word: str) -> tuple[Path, str]:
    """Return the file to write and the recipe name.  Raises Invalid."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        path = Path(f"{word}.yaml")
    name, _, version = path.stem.partition("@")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or version not in ("", "1"):
        better = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_0123456789") or "mine"
        problem = Problem(
            "bad-name",
            f'invalid recipe name "{path.stem}"',
            fix=f"use lower-case letters, digits, - and _, such as {better}",
        )
        raise Invalid([problem])
    return path, name


def _show_path(path: Path) -> str:
    if path.is_absolute() or path.parts[0] in (".", ".."):
        return str(path)
    return f"./{path}"


def _path_from_root(location: CallerLocation, path: Path) -> str:
    """Return a path relative to the workspace; only its name if it is outside the workspace."""
    root, there = os.path.abspath(location.root), os.path.abspath(location.here / path)
    if not f"{there}/".startswith(f"{root}/"):
        return os.path.basename(there)
    return os.path.relpath(there, root)


def _scaffold(name: str, shown: str, programs_at: str) -> dict[str, str]:
    """Return the files of the template: a recipe that trains a small model, and its programs.

    `programs_at` is the directory of the programs, as the recipe refers to it.
    """
    source = shipped() / "recipes" / "scaffold"
    text = (source / "scaffold.yaml").read_text("utf-8").replace("FILE", shown)
    recipe = text.replace("scaffold/", f"{programs_at}/").replace("scaffold", name)
    programs = sorted((source / "scaffold").glob("*.py"))
    return {Path(shown).name: recipe} | {
        f"{name}/{program.name}": program.read_text("utf-8") for program in programs
    }


def _tailor(args: argparse.Namespace, path: Path, name: str) -> tuple[dict[str, str], list[str]]:
    """Draft a recipe that uses a library recipe on a GPU type; return its file, and notes to print.

    Raises Invalid, NotFound, CannotRun.
    """
    from ...advice.estimates import load_hardware
    from ...language import parse
    from ...storage.workspace import Workspace
    from ..tailoring import tailor

    has_both = args.origin is not None and args.gpu is not None
    if not has_both or args.script is not None:
        known = ", ".join(gpu.name for gpu in load_hardware().gpus)
        raise Invalid(
            [
                Problem(
                    "bad-input",
                    "--from requires --gpu, and excludes --script",
                    fix=f"known GPUs: {known}",
                )
            ]
        )
    given = parse_pairs(args.inputs)
    recipe = parse.load(library.find(args.origin, args.workspace))
    if "/" in args.origin or args.origin.endswith((".yaml", ".yml")):
        raise NotFound(
            f"unknown library recipe {args.origin}",
            fix="for a recipe of your own, set `gpu` and `gpu_memory` in its `resources`",
        )
    with Workspace.open(args.workspace, read_only=True) as ws:
        made = tailor(ws, name, recipe, load_hardware().find(args.gpu), given, args.preset)
    words = [f"{each}=…" for each in made.needed]
    return {path.name: made.text}, [
        *(f"chosen: {note}" for note in made.notes),
        *made.estimated.lines,
        f"next: recipe plan {' '.join([_show_path(path), *words])}",
    ]


def _draft_script(location: CallerLocation, recipe: Path, name: str, script: Path) -> RecipeDraft:
    """Draft a recipe for a script, with the files that the script imports.

    Raises NotFound, Invalid, CannotRun.
    """
    from ...language.imports import EntryPoint
    from ...survey.imports import follow_imports, read_imports, way_to_start
    from .. import drafting

    home = _code_folder(location, recipe)
    source = Path(os.path.abspath(location.here / script))
    _check_script(script, source, home, recipe, name)
    facts = _read(source, home)
    path = source.relative_to(home).as_posix()
    start, folders = way_to_start(str(home), path)
    modules = {_module(home, folders, target) for target in facts.targets} - {""}
    starts = [start, *(EntryPoint("module", each) for each in sorted(modules))]
    needed = follow_imports(str(home), starts, folders, read_imports)
    facts = replace(facts, imports=_imports_of(home, needed.files))
    kind = functools.partial(_kind_of, home)
    made = drafting.draft(
        name, path, facts, list(needed.files), _show_path(recipe), kind, start, folders
    )
    for file, doubt in needed.doubts:
        made.look.append(f"{file}: {doubt}: check that `code` lists every file that it imports")
    return made


def _code_folder(location: CallerLocation, recipe: Path) -> Path:
    """Return the directory for a recipe's code: the workspace if the recipe is inside, or its own
    directory.
    """
    folder = Path(os.path.abspath(location.here / recipe)).parent
    root = Path(os.path.abspath(location.root))
    return root if folder.is_relative_to(root) else folder


def _check_script(script: Path, source: Path, home: Path, recipe: Path, name: str) -> None:
    """Raise NotFound or Invalid unless the script `source` is a Python file inside `home`."""
    if not source.is_file():
        raise NotFound(
            f"there is no file {script}", fix="pass the path of your Python training script"
        )
    if not source.is_relative_to(home):
        words = f"{script} is outside {home}, the directory for the code of {_show_path(recipe)}"
        fix = f"create the recipe next to the script: recipe new {script.parent / name} --script {script}"
        raise Invalid([Problem("bad-place", words, None, fix)])
    if source.suffix == ".ipynb":
        words = f"{script} is a notebook; steps run scripts only"
        fix = f"convert the notebook: jupyter nbconvert --to script {script}, then --script {script.with_suffix('.py')}"
        raise Invalid([Problem("not-python", words, None, fix)])


def _imports_of(home: Path, files: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct modules that the Python files import."""
    from ...survey.imports import read_imports

    names: dict[str, None] = {}
    for file in files:
        if file.endswith(".py"):
            names.update(dict.fromkeys(read_imports(str(home / file)).module_names))
    return tuple(names)


def _kind_of(home: Path, path: str) -> str:
    """Return "file" or "folder" for an existing path below `home`, otherwise an empty text."""
    place = home / path
    if place.is_file():
        return "file"
    return "folder" if place.is_dir() else ""


def _module(home: Path, folders: Sequence[str], target: str) -> str:
    """Return the module below `home` with the longest matching prefix of a dotted name; else empty."""
    parts = target.split(".")
    for n in range(len(parts), 0, -1):
        path = "/".join(parts[:n])
        if any((home / folder / f"{path}.py").is_file() for folder in ("", *folders)):
            return ".".join(parts[:n])
    return ""


def _config(home: Path, script: Path, folder: str, name: str) -> HydraConfig | None:
    """Read a Hydra configuration file and its groups; None if the file is missing or outside `home`."""
    from ...language import document
    from ..script_hydra import HydraConfig, targets_of

    place = Path(os.path.abspath(script.parent / folder))
    file = place / f"{name}.yaml"
    if not place.is_relative_to(home) or not file.is_file():
        return None
    content = document.read(file).value
    values = content if isinstance(content, dict) else {}
    groups = {}
    for each in place.iterdir():
        if each.is_dir():
            groups[each.name] = tuple(sorted(member.stem for member in each.glob("*.yaml")))
    targets: dict[str, None] = {}
    for each in sorted(place.rglob("*.yaml")):
        targets.update(dict.fromkeys(targets_of(document.read(each).value)))
    return HydraConfig(
        place.relative_to(home).as_posix(),
        values,
        groups,
        tuple(targets),
    )


def _read(source: Path, home: Path) -> Script:
    from .. import scripts

    try:
        return scripts.read(
            whole(source).decode("utf-8-sig"), functools.partial(_config, home, source)
        )
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{source.name}:{line}" if line else source.name
        raise Invalid(
            [
                Problem(
                    "not-python",
                    f"{where}: invalid Python: {getattr(error, 'msg', error)}",
                    None,
                    "pass the path of your Python training script",
                )
            ]
        ) from error
    except OSError as error:
        raise CannotRun(f"cannot read {source}: {error.strerror}") from error


def _next_steps(shown: str, made: RecipeDraft) -> list[str]:
    lines = [f"note: {note}" for note in made.look]
    words = [f"{name}=…" for name in made.needed]
    if made.smaller:
        words.append("--preset smoke")
    return [*lines, f"next: recipe validate {shown}; recipe run {' '.join([shown, *words])}"]
