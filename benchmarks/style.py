"""Figures of plain code: how branched, dense and wide it is, and how it is named.  Pure: sources are handed in.

`ANCHORS` has the figures of six code bases that are read easily (procrastinate, vdirsyncer, doit, dstack,
redun, Snakemake; November 2026). They are examples to follow, not limits.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

ANCHORS: Final = {
    "functions of complexity over 10, %": "0.8 to 5.5",
    "dense functions, %": "0 to 0.2",
    "conditional expressions per 1,000 lines": "1.7 to 5.5",
    "comprehensions per 1,000 lines": "3.4 to 14",
    "functions named by a participle, %": "0.3",
    "classes named by a participle, %": "0.3",
    "class names of two or more classes": "few",
    "characters of a line, median": "35 to 40",
    "lines over 100 columns per 1,000": "0 to 10",
    "comment lines, %": "2.4 to 9.5",
    "imports inside functions": "9 to 56",
}
COMPLEX: Final = 10
DENSE: Final = 0.6
"""Branches of a line from which a function of complexity `COMPLEX` or more is dense."""
WIDE: Final = 100

_IRREGULAR = """
begun bought bound bred brought broken built caught chosen drawn driven eaten fallen fed felt
forgotten fought found given gone heard held hidden kept known laid led lent lost lying made
meant paid ran risen said seen sent shot shown slept sold sought spent spoken stolen stood
struck stuck swept taken taught thought told torn understood won worn wound written
"""
_NO_PARTICIPLES = """
anything billing bring ceiling embed encoding evening everything exceed feed heading indeed
king listing mapping morning need nothing padding proceed red ring seed setting settings shed
sing something speed spelling spring string strings succeed swing thing timing training
warning wing
"""
IRREGULAR: Final = frozenset(_IRREGULAR.split())
NO_PARTICIPLES: Final = frozenset(_NO_PARTICIPLES.split())
BRANCHES: Final = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler),
    *(ast.IfExp, ast.Assert, ast.comprehension, ast.match_case),
)
COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Source(NamedTuple):
    """A module: its text and all nodes of its syntax."""

    text: str
    nodes: Sequence[ast.AST]


class Function(NamedTuple):
    """A function: its name, its cyclomatic complexity, its lines, and the imports inside it."""

    name: str
    complexity: int
    lines: int
    imports: int

    @property
    def is_dense(self) -> bool:
        return self.complexity >= COMPLEX and self.complexity / self.lines >= DENSE


def measure(sources: Sequence[Source]) -> dict[str, float]:
    """Return each figure of `ANCHORS` for `sources`, in the same order."""
    nodes = [node for source in sources for node in source.nodes]
    functions = [
        _measure_function(node)
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    class_names = list(classes.elements())
    lines = [line for source in sources for line in source.text.splitlines() if line.strip()]

    kinds = Counter(type(node) for node in nodes)

    def per_thousand(*wanted: type[ast.AST]) -> float:
        return 1000 * sum(kinds[kind] for kind in wanted) / max(1, len(lines))

    figures = (
        _percent([each.complexity > COMPLEX for each in functions]),
        _percent([each.is_dense for each in functions]),
        per_thousand(ast.IfExp),
        per_thousand(*COMPREHENSIONS),
        _percent([is_participle(each.name) for each in functions]),
        _percent([is_participle(name) for name in class_names]),
        sum(count > 1 for count in classes.values()),
        median([len(line) for line in lines] or [0]),
        10 * _percent([len(line) > WIDE for line in lines]),
        _percent([line.lstrip().startswith("#") for line in lines]),
        sum(each.imports for each in functions),
    )
    return dict(zip(ANCHORS, figures, strict=True))


def table(figures: dict[str, float]) -> list[str]:
    """Return `figures` as lines of text, each beside its anchor."""
    head = f"{'':42} {'today':>8}   model code bases"
    return [head, *(f"{name:42} {figures[name]:8.4g}   {ANCHORS[name]}" for name in figures)]


def is_participle(name: str) -> bool:
    """Whether a name is one word and that word a participle, such as `_held` or `Kept`."""
    word = name.strip("_")
    if not re.fullmatch(r"[A-Z]?[a-z]+", word) or word.lower() in NO_PARTICIPLES:
        return False
    word = word.lower()
    return word in IRREGULAR or (len(word) > 4 and word.endswith(("ed", "ing")))


def _measure_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    complexity, imports = 1, 0
    for part in ast.walk(node):
        complexity += isinstance(part, BRANCHES)
        imports += isinstance(part, ast.Import | ast.ImportFrom)
        if isinstance(part, ast.comprehension):
            complexity += len(part.ifs)
        elif isinstance(part, ast.BoolOp):
            complexity += len(part.values) - 1
    return Function(
        node.name, complexity, (node.end_lineno or node.lineno) - node.lineno + 1, imports
    )


def _percent(answers: list[bool]) -> float:
    return 100 * sum(answers) / max(1, len(answers))
