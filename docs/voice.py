"""Measure how plainly the product speaks, and fail when a place gets worse: `make lint` does.

python -m docs.voice               # the rates of each kind of text, and what got worse; ends with 1 if anything did
python -m docs.voice PAGE…         # the rates of these pages, and their lines to look at
python -m docs.voice --accept      # keep today's rates as those that may not get worse

Text that avoids the name of a thing has many pronouns and what-clauses, and short words. The rates find pages to read; whether a page is clear,
only readers can tell. So write for them, and never bend a sentence for a rate.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).parents[1]
KEPT: Final = HOME / "fixtures" / "voice.json"
"""The accepted rates of each place."""

PRONOUNS: Final = re.compile(
    r"(?:it|its|itself|he|him|his|she|her|they|them|their|theirs|themselves|this|that|these|those|which|whichever"
    r"|who|whom|whose|whoever|what|whatever|ones?|each|others?|another|none|both|n?either"
    r"|(?:every|some|any)(?:thing|one|body)|nothing|nobody)",
    re.IGNORECASE,
)
WHAT: Final = re.compile("what|whatever|whoever", re.IGNORECASE)

MARKS: Final = {
    "a what-clause for a name": r"\b(?:what|whatever|whoever)\b(?![^.]*\?)",
    "a sentence that begins with its condition or part": r"(?:^|(?<=[.;:] ))(?:Of|Beside|Below|What|Whoever)\b(?![^.]*\?)",
    "a pronoun for a name": r"\b(?:those|ones?|that|each|everything|nothing|none) (?:of|that|who)\b",
    "`where` for `if`": r"(?:^|[,;:] )[Ww]here\b(?![^.]*\?)",
}
"""Ways to avoid a name, as patterns of prose."""

SLACK: Final = 0.1
"""How much worse a place may get, as a part of its rate, beside `SPARE` words or sentences."""
SPARE: Final = 3


DOCSTRING: Final = re.compile(r'^ *"""(\S.*?)(?:"""|$)', re.MULTILINE)
"""The first line of a docstring of a function, a class or a field."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A measure of prose: how many per `per` words or sentences there may be."""

    name: str
    per: int
    aim: float


RATES: Final = (
    Rate("pronouns", 1000, 60),
    Rate("what", 1000, 1),
    Rate("colons", 100, 15),
    Rate("marks", 1000, 4),
    Rate("mood", 100, 5),
)
"""Of 1,000 words: pronouns, what-clauses and lines to look at.  Of 100 sentences: those that a colon or semicolon divides.
Of 100 docstrings of functions and verb lines: those that do not begin with an imperative."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How often each rate's subject occurs in a text (`found`), among how many words, sentences or lines (`among`)."""

    found: Mapping[str, int]
    among: Mapping[str, int]
    letters: float
    """Letters of a word, on average. English technical prose has 4.5 and more."""

    def rate(self, rate: Rate) -> float:
        return rate.per * self.found.get(rate.name, 0) / max(1, self.among.get(rate.name, 0))


# ---------------------------------------------------------------- measure


def prose(text: str) -> str:
    """Return the running text of a page: no code, tables, headings or addresses of links."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:#+ |\||<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "`", text)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of prose; the items of a list are sentences of their own."""
    blocks = re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text)
    parts = [
        part
        for block in blocks
        for part in re.split(r"(?<=[.!?])[)*]*\s+", " ".join(block.split()))
    ]
    return [part for part in parts if len(re.findall(r"[A-Za-z]+", part)) >= 3]


def find_marks(sentence: str) -> list[str]:
    """Return the ways in which a sentence avoids a name."""
    return [name for name, pattern in MARKS.items() if re.search(pattern, sentence)]


def measure(text: str) -> Measure:
    """Measure prose."""
    words = re.findall(r"[A-Za-z]+(?:['’-][A-Za-z]+)*", text)
    found = sentences(text)
    return Measure(
        {
            "pronouns": sum(bool(PRONOUNS.fullmatch(word)) for word in words),
            "what": sum(bool(WHAT.fullmatch(word)) for word in words),
            "colons": sum(_is_divided(sentence) for sentence in found),
            "marks": sum(len(find_marks(sentence)) for sentence in found),
        },
        {"pronouns": len(words), "what": len(words), "colons": len(found), "marks": len(words)},
        sum(map(len, words)) / max(1, len(words)),
    )


def _is_divided(sentence: str) -> bool:
    """Return True if a colon or semicolon joins two statements.

    A colon after the bold name of a list item, before code or before a list does not count.
    """
    rest = re.sub(r"^\s*(?:[-*]|\d+\.)?\s*\*\*[^*]+\*\*:?", "", sentence)
    return bool(re.search(r"[:;] +[A-Za-z]", rest))


# ---------------------------------------------------------------- places


def pages() -> dict[str, str]:
    """Return the prose of each page by its path; the library's page is generated from input docs."""
    paths = [HOME / "README.md", HOME / "CONTRIBUTING.md", *sorted(HOME.glob("docs/*.md"))]
    return {
        path.relative_to(HOME).as_posix(): prose(path.read_text("utf-8"))
        for path in paths
        if path.name != "library.md"
    }


def strings() -> dict[str, list[str]]:
    """Return the product's other texts by kind."""
    sources = [
        path.read_text("utf-8")
        for room in ("runner", "drivers")
        for path in sorted((HOME / room).rglob("*.py"))
    ]
    given: dict[str, list[str]] = {"help": [], "fix": []}
    for source in sources:
        if "help=" in source or "fix=" in source:
            _collect_arguments(ast.parse(source), given)
    return {
        "command help": given["help"],
        "fixes": given["fix"],
        "docstrings": [text for source in sources for text in DOCSTRING.findall(source)],
        "input docs": _input_docs(),
    }


def _collect_arguments(tree: ast.Module, given: Mapping[str, list[str]]) -> None:
    """Add the literal texts that calls pass by these names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and (texts := given.get(node.arg or "")) is not None:
            texts += filter(None, [_text(node.value)])


def _text(node: ast.expr) -> str:
    """Return a literal text; values in it are left out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "`" for part in node.values)
    return ""


def _input_docs() -> list[str]:
    """Return the texts of `doc` in the library's recipes; YAML is not read for that."""
    inline = re.compile(r"""\bdoc: *(?:"([^"\n]*)"|'([^'\n]*)'|([^"'>|\n][^\n}]*))""")
    found = [
        next(filter(None, match), "")
        for path in sorted((HOME / "recipes").rglob("*.yaml"))
        for match in inline.findall(path.read_text("utf-8"))
    ]
    return list(dict.fromkeys(found))


def moods() -> dict[str, tuple[int, int]]:
    """Return how many docstrings and verb lines do not begin with an imperative, as ruff sees it, and how many there are."""
    from runner.interface.cli.verbs import VERBS

    lines = "\n".join(
        f'def verb_{n}():\n    """{says}."""' for n, (_, says) in enumerate(VERBS.values())
    )
    functions = sum(
        len(re.findall(r':\n +"""', path.read_text("utf-8")))
        for room in ("runner", "drivers")
        for path in (HOME / room).rglob("*.py")
    )
    return {
        "command help": (_without_imperative(["-"], lines), len(VERBS)),
        "docstrings": (_without_imperative(["runner", "drivers"]), functions),
    }


def _without_imperative(paths: list[str], text: str = "") -> int:
    ruff = Path(sys.executable).with_name("ruff")
    options = ["check", "--isolated", "--select", "D401", "--output-format", "concise", "--quiet"]
    done = subprocess.run(
        [ruff, *options, *paths], cwd=HOME, input=text, capture_output=True, text=True, check=False
    )
    return sum(" D401 " in line for line in done.stdout.splitlines())


def places() -> dict[str, Measure]:
    """Measure every page, and each kind of text in the code."""
    found = {name: measure(text) for name, text in pages().items()}
    begun = moods()
    for kind, texts in strings().items():
        whole = measure("\n\n".join(re.sub(r"`[^`]*`", "`", text) for text in texts))
        wrong, lines = begun.get(kind, (0, 0))
        found[kind] = Measure(
            {**whole.found, "mood": wrong}, {**whole.among, "mood": lines}, whole.letters
        )
    return found


# ---------------------------------------------------------------- the ratchet


def worse(now: Measure, before: Mapping[str, float]) -> list[str]:
    """Say which rates of a place got worse than accepted; a new place has to meet the aims."""
    wrong = []
    for rate in RATES:
        allowed = max(rate.aim, before.get(rate.name, 0.0))
        room = allowed * now.among.get(rate.name, 0) / rate.per * (1 + SLACK) + SPARE
        if now.found.get(rate.name, 0) > room:
            wrong.append(
                f"{rate.name} {now.rate(rate):.1f}, accepted {allowed:.1f} (aim {rate.aim:g})"
            )
    return wrong


def collect_rates(now: Mapping[str, Measure]) -> dict[str, dict[str, float]]:
    """Return the current rates of every place, to be stored as accepted."""
    return {
        name: {rate.name: round(each.rate(rate), 1) for rate in RATES if each.among.get(rate.name)}
        for name, each in now.items()
    }


def score(now: Mapping[str, Measure]) -> Iterator[str]:
    """Yield a table: the rates of all pages together, of each kind of text, and the aims."""
    yield f"{'':16}" + "".join(f"{rate.name:>10}" for rate in RATES) + f"{'letters':>10}"
    whole = measure("\n\n".join(pages().values()))
    for name, each in [("pages", whole), *((n, m) for n, m in now.items() if ".md" not in n)]:
        cells = "".join(
            f"{each.rate(rate):10.1f}" if each.among.get(rate.name) else f"{'-':>10}"
            for rate in RATES
        )
        yield f"{name:16}{cells}{each.letters:10.2f}"
    yield f"{'aim':16}" + "".join(f"{rate.aim:10.1f}" for rate in RATES) + f"{4.5:10.2f}"


def look(names: Iterable[str]) -> None:
    """Print the rates of pages, and their lines to look at."""
    for name in names:
        text = prose(Path(name).read_text("utf-8"))
        each = measure(text)
        print(name, *(f"{rate.name} {each.rate(rate):.1f}" for rate in RATES[:4]), sep="  ")
        for sentence in sentences(text):
            if reasons := find_marks(sentence):
                print(f"  {sentence}\n    -> {', '.join(reasons)}")


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a place got worse."""
    names = [each for each in arguments if not each.startswith("-")]
    if names:
        look(names)
        return 0
    now = places()
    if "--accept" in arguments:
        KEPT.write_text(json.dumps(collect_rates(now), indent=1) + "\n", "utf-8")
    print(*score(now), sep="\n")
    kept = json.loads(KEPT.read_text("utf-8")) if KEPT.exists() else {}
    wrong = [
        f"{name}: {text}" for name, each in now.items() for text in worse(each, kept.get(name, {}))
    ]
    print(*wrong, sep="\n")
    if wrong:
        print("fix: `python -m docs.voice PAGE` shows the lines to look at; name the thing")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
