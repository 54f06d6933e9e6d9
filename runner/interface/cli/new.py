"""`recipe new`: write a recipe to begin with.  Decides names and places, and never replaces a file; what a recipe says is in `recipes/scaffold/`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from ...errors import CannotRun, Invalid, NotFound, Problem
from ...language import library


def arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    parser.add_argument("path", metavar="NAME|PATH", help="what to call it, or the file to write (never replaced)")
    parser.epilog = "examples:\n  recipe new words"


def run(args: argparse.Namespace) -> int:
    path, name = _named(args.path)
    files = _scaffold(name, _shown(path))
    written = write(args.workspace, path, files)
    print(_shown(path))
    if not args.quiet:
        shown = _shown(path)
        print(f"written: {', '.join(written)}", file=sys.stderr)
        print(f"now: recipe run {shown} --preset smoke; then put your programs in the place of those in {name}/", file=sys.stderr)
    return 0


def write(workspace: Path, path: Path, files: dict[str, str]) -> list[str]:
    """Write files, by their paths from the folder of the recipe `path`, and the schema beside it where there is none.  All or nothing.

    Returns what was written, as shown to people.  Raises NotFound when one is there already, CannotRun when one cannot be written.
    """
    folder = (workspace / path).parent
    for file in files:
        if os.path.lexists(folder / file):
            raise NotFound(f"{_shown(path.parent / file)} is there already, and is left as it is", fix="give another name")
    # An editor finds the schema beside the recipe; one that is there already may be a team's own.
    wanted = dict(files)
    if not os.path.lexists(folder / "recipe.schema.json"):
        wanted["recipe.schema.json"] = library.schema_text()
    made: list[Path] = []
    try:
        for file, text in wanted.items():
            target = folder / file
            if target.parent != folder and not target.parent.exists():
                target.parent.mkdir()
                made.append(target.parent)
            with target.open("x", encoding="utf-8") as stream:
                made.append(target)
                stream.write(text)
    except OSError as error:
        for target in reversed(made):
            target.rmdir() if target.is_dir() else target.unlink()
        raise CannotRun(f"{_shown(path)} cannot be written: {error.strerror}", fix="name a folder that exists and is yours") from error
    return [_shown(path.parent / file) for file in wanted]


def _named(word: str) -> tuple[Path, str]:
    """The file to write and the name of the recipe in it.  Raises Invalid."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        path = Path(f"{word}.yaml")
    name, _, version = path.stem.partition("@")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or version not in ("", "1"):
        better = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-_0123456789") or "mine"
        problem = Problem("bad-name", f'"{path.stem}" is not the name of a first recipe', fix=f"lower case, digits, - and _, such as {better}")
        raise Invalid([problem])
    return path, name


def _shown(path: Path) -> str:
    return f"./{path}" if not path.is_absolute() and path.parts[0] not in (".", "..") else str(path)


def _scaffold(name: str, shown: str) -> dict[str, str]:
    """The files of a recipe that trains something small, and of its programs."""
    source = library.home() / "recipes" / "scaffold"
    recipe = (source / "scaffold.yaml").read_text("utf-8").replace("FILE", shown).replace("scaffold", name)
    programs = sorted((source / "scaffold").glob("*.py"))
    return {Path(shown).name: recipe} | {f"{name}/{program.name}": program.read_text("utf-8") for program in programs}
