"""Make mistakes in every shipped recipe and example, by seeded operators, and count what `recipe validate` finds of each kind.

usage: mutations.py [--sites N] [--seed S] [--missed KIND] [--write]

One mistake at a time.  `--write` puts the table into docs/errors.md; `--missed` lists what was not found of one kind.
A mutation that leaves the same recipe (texts for people, the order of a mapping) is no mistake and is not counted.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from runner.errors import Invalid, Problem
from runner.language import document as documents
from runner.language import yaml_text
from runner.survey import validation

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/errors.md"
PROSE = ("doc", "summary")
_TEMPLATE = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"\b(?:inputs|steps|outputs|state|matrix)(?:\.[a-z_][a-z0-9_]*)+")
_QUOTED = re.compile(
    r"""(?<=[:,\[{] )"[^"\n]*"(?=\s*[,\]}\n])|(?<=[:,\[{] )'[^'\n]*'(?=\s*[,\]}\n])"""
)
_CHOICE = re.compile(r"\{\{\s*(.+?) if (.+?) else (.+?)\s*\}\}")

Path_ = tuple[str | int, ...]


class Mutant(NamedTuple):
    """A recipe with one mistake: its kind, where it is, and what makes the text."""

    kind: str
    place: str
    make: Callable[[], str]


class Judgement(NamedTuple):
    """What `validate` says of a mutant."""

    mutant: Mutant
    found: bool


def recipes() -> list[Path]:
    """Every recipe of the library and of the examples."""
    return sorted([*ROOT.glob("recipes/*@*.yaml"), *ROOT.glob("examples/*/*.yaml")])


def problems(path: Path, text: str) -> list[Problem]:
    """What `recipe validate` says of a recipe in the place of this file."""
    own = path.parent.parent.name == "examples"
    try:
        document = documents.parse(text.encode(), str(path))
        return validation.find_problems(document, path.parent, {}, path if own else None)
    except Invalid as error:
        return list(error.problems)


# -- places in a tree ------------------------------------------------------------------------------------------------------------------------------


def places(tree: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place below a tree, without texts for people."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, value in children:
        if name in PROSE:
            continue
        yield (*path, name)
        yield from places(value, (*path, name))


def at(tree: Any, path: Path_) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def replace_at(tree: Any, path: Path_, value: Any) -> Any:
    """A copy of a tree with another value at a place."""
    whole = copy.deepcopy(tree)
    at(whole, path[:-1])[path[-1]] = value
    return whole


def rename_key(tree: Any, path: Path_, name: str) -> Any:
    """A copy of a tree with another key at a place; the order stays."""
    whole = copy.deepcopy(tree)
    above = at(whole, path[:-1])
    items = [(name if key == path[-1] else key, value) for key, value in above.items()]
    above.clear()
    above.update(items)
    return whole


def drop_key(tree: Any, path: Path_) -> Any:
    whole = copy.deepcopy(tree)
    del at(whole, path[:-1])[path[-1]]
    return whole


def typo(word: str, rng: random.Random) -> str:
    """A word with one letter dropped, doubled or swapped with the next."""
    n = rng.randrange(len(word))
    ways = [word[:n] + word[n + 1 :], word[:n] + word[n] + word[n:]]
    if n + 1 < len(word) and word[n] != word[n + 1]:
        ways.append(word[:n] + word[n + 1] + word[n] + word[n + 2 :])
    return rng.choice([way for way in ways if way and way != word])


def move_key(tree: Any, path: Path_, into: Path_) -> Any:
    """A copy of a tree with a key in another mapping."""
    whole = drop_key(tree, path)
    at(whole, into)[path[-1]] = at(tree, path)
    return whole


def path_text(path: Path_) -> str:
    return "/".join(map(str, path))


# -- operators: each gives every mistake of its kind that a recipe allows ----------------------------------------------------------------------------


def rename_keys(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path in places(tree):
        if isinstance(path[-1], str):
            make = partial(rename_key, tree, path, typo(path[-1], rng))
            yield Mutant(_kind_of_key(path), path_text(path), _text(make))


def _text(make: Callable[[], Any]) -> Callable[[], str]:
    return lambda: yaml_text.block(make())


def _kind_of_key(path: Path_) -> str:
    """Renamed keys are of two kinds: words of the language and names of the recipe, and names that a program reads."""
    inside = ("env", "args", "files", "default", "choices", "with", "uses")
    words = [str(part) for part in path[:-1]]
    free = any(word in inside for word in words[2:]) or words[:1] == ["env"]
    return "rename a key that a program reads" if free else "rename a key"


def rename_in_templates(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path, value in _texts(tree):
        for template in _TEMPLATE.finditer(value):
            for name in _NAME.finditer(value, *template.span(1)):
                first, dot, rest = name[0].partition(".")
                if first == "state" or rng.random() < 0.2:
                    changed = typo(first, rng) + dot + rest
                else:
                    head, _, last = rest.rpartition(".")
                    changed = f"{first}.{head + '.' if head else ''}{typo(last, rng)}"
                word = value[: name.start()] + changed + value[name.end() :]
                make = partial(replace_at, tree, path, word)
                yield Mutant("rename in a template", f"{path_text(path)}: {changed}", _text(make))


def drop_keys(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path in places(tree):
        kind = "drop a list item" if isinstance(path[-1], int) else "drop a key"
        yield Mutant(kind, path_text(path), _text(partial(drop_key, tree, path)))


def retype_values(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path in places(tree):
        value = at(tree, path)
        other: Any = None
        if isinstance(value, bool):
            other = rng.choice(["yes", 1, [value]])
        elif isinstance(value, (int, float)):
            other = rng.choice([f"{value}x", True, [value]])
        elif isinstance(value, str):
            other = rng.choice([[value, "x"], {"x": value}, 7])
        elif isinstance(value, list):
            other = rng.choice(["x", 7, {"x": value}])
        elif isinstance(value, dict):
            other = rng.choice(["x", 7, [value]])
        make = partial(replace_at, tree, path, other)
        yield Mutant("retype a value", f"{path_text(path)}: {other}"[:90], _text(make))


def unquote_texts(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for quoted in _QUOTED.finditer(text):
        line = text.count("\n", 0, quoted.start()) + 1
        if re.match(rf"\s*(?:-\s*)?(?:{'|'.join(PROSE)}):", text.splitlines()[line - 1]):
            continue
        changed = text[: quoted.start()] + quoted[0][1:-1] + text[quoted.end() :]
        yield Mutant("unquote", f"line {line}: {quoted[0]}"[:90], partial(str, changed))


def move_keys(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path in places(tree):
        if not isinstance(path[-1], str) or len(path) < 2 or not isinstance(path[-2], str):
            continue
        if isinstance(at(tree, path[:-2]), dict) and path[-1] not in at(tree, path[:-2]):
            make = partial(move_key, tree, path, path[:-2])
            yield Mutant("nest a key too far out", path_text(path), _text(make))
        names = list(at(tree, path[:-1]))
        before = names.index(path[-1]) - 1
        sibling = at(tree, path[:-1])[names[before]] if before >= 0 else None
        if isinstance(sibling, dict) and path[-1] not in sibling:
            make = partial(move_key, tree, path, (*path[:-1], names[before]))
            yield Mutant("nest a key too far in", path_text(path), _text(make))


def swap_branches(text: str, tree: Any, rng: random.Random) -> Iterator[Mutant]:
    for path, value in _texts(tree):
        for choice in _CHOICE.finditer(value):
            swapped = f"{{{{ {choice[3]} if {choice[2]} else {choice[1]} }}}}"
            word = value[: choice.start()] + swapped + value[choice.end() :]
            make = partial(replace_at, tree, path, word)
            yield Mutant("swap a branch", f"{path_text(path)}: {swapped}"[:120], _text(make))
        if path[-1] == "when" and value.startswith("{{"):
            word = f"{{{{ not ({value[2:-2].strip()}) }}}}"
            make = partial(replace_at, tree, path, word)
            yield Mutant("swap a branch", f"{path_text(path)}: {word}"[:120], _text(make))


def _texts(tree: Any) -> Iterator[tuple[Path_, str]]:
    for path in places(tree):
        value = at(tree, path)
        if isinstance(value, str) and "{{" in value:
            yield path, value


Operator = Callable[[str, Any, random.Random], Iterator[Mutant]]
OPERATORS: Mapping[str, Operator] = {
    "renames_of_keys": rename_keys,
    "renames_in_templates": rename_in_templates,
    "drops": drop_keys,
    "retypes": retype_values,
    "unquotes": unquote_texts,
    "renests": move_keys,
    "branches": swap_branches,
}
"""The operators by the word that seeds their choice. Another word chooses other mistakes."""


# -- the count -------------------------------------------------------------------------------------------------------------------------------------


def mutants(path: Path, sites: int, seed: int) -> Iterator[Mutant]:
    """So many mistakes of each operator in one recipe, the same for the same seed."""
    text = path.read_text("utf-8")
    tree = documents.parse(text, str(path)).value
    for word, operator in OPERATORS.items():
        rng = random.Random(f"{seed} {path.name} {word}")
        every = list(operator(text, tree, rng))
        yield from rng.sample(every, min(sites, len(every)))


def judge_mutants(path: Path, sites: int, seed: int) -> Iterator[Judgement]:
    """What is found of the mistakes in one recipe, without those that change nothing."""
    plain = documents.parse(path.read_text("utf-8"), str(path)).value
    for mutant in mutants(path, sites, seed):
        text = mutant.make()
        try:
            same = documents.parse(text, str(path)).value == plain
        except Invalid:
            same = False
        if not same:
            yield Judgement(mutant, bool(problems(path, text)))


def alarms() -> list[str]:
    """What is said of recipes without a mistake, as they are and as the operators write them."""
    said = []
    for path in recipes():
        text = path.read_text("utf-8")
        again = yaml_text.block(documents.parse(text, str(path)).value)
        said += [f"{path}: {each}" for each in [*problems(path, text), *problems(path, again)]]
    return said


WHY = {
    "rename a key": "a name that nothing else mentions: an output, a preset, a last step",
    "rename a key that a program reads": "environment variables and files can have any name, and recipe cannot read the options of every program",
    "rename in a template": "",
    "drop a key": "an optional key, such as `timeout`, `metrics`, a limit or an option that a script does not need",
    "drop a list item": "a recipe without an optional argument, or with one choice less, is still valid",
    "retype a value": "arguments, variables and files accept every type, and a text input accepts any text",
    "unquote": "most texts mean the same without quotes",
    "nest a key too far out": "a key in a file that a program reads",
    "nest a key too far in": "the key becomes another output, argument or variable",
    "swap a branch": "both branches are valid for some value, and neither branch reads a value that is null under its condition",
}


def table(verdicts: Sequence[Judgement]) -> str:
    """The share that is found of each kind, as a table."""
    tried = Counter(each.mutant.kind for each in verdicts)
    found = Counter(each.mutant.kind for each in verdicts if each.found)
    lines = ["| mistake | tried | found | not found |", "|---|---|---|---|"]
    for kind, why in WHY.items():
        if tried[kind]:
            share = 100 * found[kind] / tried[kind]
            lines.append(f"| {kind} | {tried[kind]:,} | {share:.0f}% | {why} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", type=int, default=15, help="Mistakes per recipe and operator")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--missed", metavar="KIND", help="List what was not found of a kind")
    parser.add_argument("--write", action="store_true", help="Write the table into docs/errors.md")
    args = parser.parse_args(words)
    if said := alarms():
        print("\n".join(said))
        return 1
    verdicts = [each for path in recipes() for each in judge_mutants(path, args.sites, args.seed)]
    for each in verdicts:
        if args.missed == each.mutant.kind and not each.found:
            print(each.mutant.place)
    print(table(verdicts))
    if args.write:
        head, begin, rest = PAGE.read_text("utf-8").partition("<!-- mutations:begin -->\n")
        _, end, tail = rest.partition("<!-- mutations:end -->")
        PAGE.write_text(f"{head}{begin}{table(verdicts)}\n{end}{tail}", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
