"""`recipe import`: draft a recipe from another tool's file, without overwriting files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...advice.estimates import load_hardware
from ...errors import CannotRun, Invalid, NotFound, Problem
from ...language import parse, yaml_text
from ..importing import (
    ImportedRecipe,
    Table,
    folders_of_lock,
    from_dvc,
    from_sky,
    parameter_files,
    text_of,
)
from ..importing_snakemake import from_snakemake, rules_of
from .flags import ask_consent
from .new import write

_LARGEST = 4 << 20


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="A dvc.yaml file, a SkyPilot task, or a Snakefile"
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="Name of the recipe (default: the name of the directory or task)",
    )
    parser.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="Skip the confirmation before reading a Snakefile, which Snakemake executes",
    )
    parser.epilog = "Examples:\n  recipe import dvc.yaml\n  recipe import sky.yaml finetune\n  recipe import Snakefile"


def run(args: argparse.Namespace) -> int:
    here = args.location.here
    source = here / Path(args.file).expanduser()
    made = _import(source, args.location.root, args)
    folder = source.parent
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    target = folder / f"{str(made.recipe['recipe']).partition('@')[0]}.yaml"
    write(args.location, target, {target.name: text_of(made, source.name)})
    print(target)
    if not args.quiet:
        _explain(here / target, target, made)
    return 0


def _import(source: Path, root: Path, args: argparse.Namespace) -> ImportedRecipe:
    """Return the draft of a recipe from another tool's file.  Raises RecipeError."""
    if source.name == "Snakefile" or source.suffix == ".smk":
        name = _recipe_name(args.name, root.resolve().name)
        return _snakemake(name, source, root, args)
    value = _read(source, args.file)
    if isinstance(value.get("stages"), dict):
        name = _recipe_name(args.name, source.resolve().parent.name)
        return _dvc(name, source, value, root)
    if "run" in value and "steps" not in value:
        task_name = str(value.get("name") or source.stem)
        return _sky(_recipe_name(args.name, task_name), source, value, root)
    words = f"{args.file} is neither a dvc.yaml with `stages` nor a SkyPilot task with `run`"
    fix = "pass a dvc.yaml, a SkyPilot task or a Snakefile"
    raise Invalid([Problem("bad-file", words, fix=fix)])


def _explain(path: Path, shown: Path, made: ImportedRecipe) -> None:
    """Print the points to check in the draft, and the command to run next."""
    lines = [f"check: {line}" for line in made.look]
    try:
        parse.load(path)
    except Invalid as error:
        lines += [
            f"{len(error.problems)} problems remain; list them with `recipe validate {shown}`"
        ]
    else:
        lines += [f"next: recipe plan ./{shown}"]
    print("\n".join(lines), file=sys.stderr)


def _read(path: Path, shown: str) -> Table:
    """Return the mapping in a YAML file; empty for a file without one.  Raises RecipeError."""
    value = _load(path, shown, "YAML", yaml_text.load)
    return value if isinstance(value, dict) else {}


def _load(path: Path, shown: str, language: str, decode: Callable[[str], Any]) -> Any:
    """Return the value of a file in a language, read by `decode`.  Raises RecipeError."""
    import yaml

    try:
        if path.stat().st_size > _LARGEST:
            raise CannotRun(
                f"{shown} is larger than {_LARGEST >> 20} MB", fix="pass a pipeline or task file"
            )
        return decode(path.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {shown}", fix="pass a dvc.yaml, a SkyPilot task or a Snakefile"
        ) from None
    except OSError as error:
        raise CannotRun(
            f"cannot read {shown}: {error.strerror}", fix="make the file readable"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The errors of JSON, of TOML, of encodings and of tags such as `!!int x` are ValueErrors.
        raise Invalid(
            [
                Problem(
                    "bad-file",
                    f"{shown} is not valid {language}: {' '.join(str(error).split())[:300]}",
                    fix="fix the error in the file, then import again",
                )
            ]
        ) from error


def _recipe_name(given: str | None, default: str) -> str:
    """Return the name of the recipe, `given` or `default`, in the characters of recipe names."""
    word = given or default
    name = re.sub(r"[^a-z0-9_-]+", "-", word.lower()).strip("-_")
    return name if name[:1].isalpha() else f"from-{name}".rstrip("-")


# -- Snakemake


def _snakemake(name: str, source: Path, root: Path, args: argparse.Namespace) -> ImportedRecipe:
    """Draft a recipe from a Snakefile, which Snakemake executes.  Raises NotFound, CannotRun."""
    if not source.is_file():
        raise NotFound(f"there is no file {args.file}", fix="pass the path of a Snakefile")
    python = _python_of_snakemake()
    warning = f"to read {args.file}, Snakemake executes it"
    unasked = CannotRun(warning, fix="review the file, then add `--yes`")
    if not args.yes and not ask_consent(f"{warning}. Continue?", unasked):
        raise unasked
    read = rules_of(python, source, root)
    return from_snakemake(name, read, lambda path: _kind(root / path))


def _python_of_snakemake() -> str:
    """Return the Python of `snakemake` on PATH, otherwise recipe's own Python.

    Raises CannotRun if Snakemake is not installed.
    """
    program = shutil.which("snakemake")
    if program is not None:
        with open(program, "rb") as file:
            first = file.readline().decode("utf-8", "replace").strip()
        if first.startswith("#!"):
            python = first[2:].split()[0]
            if os.path.isabs(python):
                return python
    if importlib.util.find_spec("snakemake") is None:
        raise CannotRun(
            "importing a Snakefile requires Snakemake, which is not installed",
            fix="install Snakemake 8 or newer and put `snakemake` on PATH",
        )
    return sys.executable


# -- DVC


def _dvc(name: str, source: Path, pipeline: Table, root: Path) -> ImportedRecipe:
    base = _base(source, root)
    home = source.parent
    params: Table = {}
    for file in sorted(parameter_files(pipeline)):
        if not os.path.isfile(home / file):
            continue
        value = _params(home / file)
        if isinstance(value, dict):
            params[_from_root(base, file)] = value
    folders = {_from_root(base, path) for path in _folders(home / "dvc.lock")}

    def is_folder(path: str) -> bool:
        # An output that is not there yet is known from dvc.lock only.
        return path in folders or os.path.isdir(root / path)

    return from_dvc(name, pipeline, base, params, is_folder, lambda path: _kind(root / path))


def _from_root(base: str, path: str) -> str:
    """Return a path relative to the workspace root, given relative to the directory `base`."""
    if base:
        path = f"{base}/{path}"
    return os.path.normpath(path)


def _base(source: Path, root: Path) -> str:
    """Return a file's directory relative to the workspace root, empty for the root itself.

    Raises CannotRun if the file is outside the workspace.
    """
    home, top = source.resolve().parent, root.resolve()
    if not home.is_relative_to(top):
        raise CannotRun(
            f"{source} is not below {root}",
            fix=f"import in its directory: recipe import -C {source.parent} {source.name}",
        )
    return "" if home == top else str(home.relative_to(top))


def _params(path: Path) -> Any:
    """Return the content of a JSON, TOML or YAML file; None for other files."""
    if path.suffix == ".json":
        return _load(path, path.name, "JSON", json.loads)
    if path.suffix == ".toml":
        return _load(path, path.name, "TOML", tomllib.loads)
    if path.suffix in (".yaml", ".yml"):
        return _read(path, path.name)
    return None


def _folders(lock: Path) -> set[str]:
    """Return the outputs that are directories, according to dvc.lock."""
    if not lock.is_file():
        return set()
    return folders_of_lock(_read(lock, lock.name))


def _kind(path: Path) -> str:
    """Return the kind of a path, as in `importing.Kind`."""
    # Unlike the methods of Path, these return False for a name that is too long.
    if os.path.isdir(path):
        has_programs = any(path.glob("**/*.py"))
        return "code" if has_programs else "folder"
    return "file" if os.path.exists(path) else ""


# -- SkyPilot


def _sky(name: str, source: Path, task: Table, root: Path) -> ImportedRecipe:
    base = _base(source, root)
    workdir = task.get("workdir") or "."
    if not isinstance(workdir, str):
        workdir = "."  # a Git repository, which from_sky notes
    path = os.path.normpath(f"{base or '.'}/{workdir}")
    prefix = "" if path == "." else f"{path}/"
    code = [f"{prefix}{file}" for file in _code_in(source.parent / workdir, source)]
    return from_sky(name, task, base, code, {gpu.asked for gpu in load_hardware().gpus})


def _code_in(folder: Path, task: Path) -> list[str]:
    """Return the scripts and directories with code in a folder, without the file of the task."""
    if not os.path.isdir(folder):
        return []
    code = []
    for file in sorted(folder.iterdir()):
        if file != task and _is_code(file):
            code.append(f"{file.name}/" if file.is_dir() else file.name)
    return code


def _is_code(path: Path) -> bool:
    """Return True for scripts and for directories with Python files, unless they are hidden."""
    if path.name.startswith("."):
        return False
    return path.suffix in (".py", ".sh") or _kind(path) == "code"
