"""Decide where values are allowed in a shell script, and which commands evaluate them.

The reader fills a `Frame` per list of commands, and calls `Values` for each expression, word and
command.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .interpreters import (
    INNER,
    VALUE,
    CommandWord,
    ValueRestriction,
    declares,
    find_evaluated,
    find_restrictions,
    find_source,
    parse_assignment,
)
from .template import TemplateError, expressions

_SUBSCRIPT = re.compile(r"\{?[A-Za-z_][A-Za-z0-9_]*\[(?!.*\]\+?=)", re.DOTALL)
_KEY = re.compile(r"\[(?!.*\]\+?=)", re.DOTALL)
_VARIABLE = re.compile(r"(?<![#A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_]*")
_SET_AT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[(.*)\]\+?=", re.DOTALL)
_KEYED = re.compile(
    r"\b(?:declare|typeset|local)[ \t]+-[A-Za-z]*A[A-Za-z]*[ \t]+([A-Za-z_][A-Za-z0-9_]*)"
)
_ELEMENTS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[.*\])?\+?=\(", re.DOTALL)
_ARRAY = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*)(?:\[|\+?=\()|"
    r"\b(?:mapfile|readarray|"
    r"(?:declare|typeset|local|readonly|export|read)[ \t]+(?:-[A-Za-z]*[ \t]+)*-[A-Za-z]*[aA])"
    r"\b([^;&|\n]*)"
)
_QUOTING = re.compile(r"\\\n|[\"']|\\(?=.)|\$(?=[\"'])")
_EDGE_BEFORE = frozenset(" \t\n;&|(<>`")
_EDGE_AFTER = frozenset(" \t\n;&|)<>`")
_DOUBT = "{} may execute this value as code"
_ENV_WAY = "pass the value in `env:` and read the variable there: `bash -c 'echo \"$NAME\"'`"


class Doubt(NamedTuple):
    """A probable mistake in a shell script."""

    code: str
    message: str
    offset: int
    length: int
    fix: str = ""


def read_as_source(by: str, offset: int, length: int) -> Doubt:
    """Return the doubt about a template value that `by` evaluates as code."""
    return Doubt("template-in-code", _DOUBT.format(by), offset, length, _ENV_WAY)


class Position(NamedTuple):
    """Position of one template expression in a shell script.

    `quoted`: the script quotes it. `alone`: it is a whole word, so a list may become several words.
    """

    role: Literal["text", "number", "operand", "comment"]
    quoted: bool
    alone: bool = False


class ParsedScript(NamedTuple):
    """A parsed shell script, with its expressions in order and the offsets of its pipes."""

    places: tuple[Position, ...]
    errors: tuple[TemplateError, ...]
    warnings: tuple[Doubt, ...]
    pipes: tuple[int, ...]


@dataclass(slots=True)
class Compound:
    """A compound command, such as `( )`, `{ }`, `if`, a loop or `case`, that starts at `at`.

    Its pipeline starts at `begin`. `input` is the interpreter inside that evaluates its input.
    """

    begin: int
    at: int
    input: str = ""


class HereDocument(NamedTuple):
    """A here-document, with its delimiter in a command at `at`."""

    delimiter: str
    is_quoted: bool
    strips_tabs: bool
    at: int


@dataclass(slots=True)
class Frame:
    """Parser state for one list of commands.

    This is the script, the inside of `$( )`, `<( )` or backquotes, or the elements of an array.
    """

    close: str
    array: str = ""  # the variable whose elements these are
    number: bool = False  # its output may be arithmetic
    feeder: int = -1  # start of the command that feeds a `>( )`; else -1
    places: set[int] = field(default_factory=set)  # expressions directly in this frame
    words: list[CommandWord] = field(default_factory=list)  # of the simple command so far
    word: int = -1  # where the word being read began; -1 between words
    begin: int = -1  # where the pipeline being read began; -1 between pipelines
    piped: bool = False  # nothing was read yet behind a `|`
    redirect: str = ""  # the operator in front of the next word
    cases: list[str] = field(default_factory=list)  # subject, pattern or body, innermost last
    depth: int = 0
    compounds: list[Compound] = field(default_factory=list)  # that are open
    closed: tuple[Compound, int] | None = None  # the one that was just closed, and where
    pending: list[HereDocument] = field(default_factory=list)  # whose bodies come next

    @property
    def case_part(self) -> str:
        """Part of the innermost `case` command: subject, pattern or body. Empty outside of one."""
        return self.cases[-1] if self.cases else ""

    @property
    def is_empty(self) -> bool:
        """True if the current command has no words yet."""
        return all(word.redirect for word in self.words)

    @property
    def is_test(self) -> bool:
        """True inside `[[ ]]`."""
        return not self.is_empty and self.words[0].text == "[["

    def begin_word(self, at: int) -> None:
        """Add the character at `at` to the current word, or start a new one."""
        if self.word < 0:
            self.word = at
        self.piped = False
        if self.begin < 0:
            self.begin = at


class Values:
    """The template expressions of a shell script: their positions and their reading commands."""

    def __init__(self, text: str) -> None:
        self.text = text
        found = expressions(text)
        self.spans: Mapping[int, int] = {each.offset: each.offset + each.length for each in found}
        self.offsets = list(self.spans)
        self.places: dict[int, Position] = {}
        self.errors: dict[int, TemplateError] = {}
        self.sources: list[ValueRestriction] = []  # code, also of other interpreters
        # Of here-documents: start, end, and where their command named them.
        self.bodies: list[tuple[int, int, int]] = []
        self.assigned: list[tuple[str, int]] = []  # variables, and expressions they are set to
        self.keyed = set(_KEYED.findall(text))
        self.computed: set[str] = set()  # variables whose value a shell evaluates
        self.arrays = _find_arrays(text)

    def finish(self, pipes: tuple[int, ...]) -> ParsedScript:
        """Return the result after the whole script has been parsed."""
        for name, at in self.assigned:
            if name in self.computed:
                self._limit(at, "number")
        # The reader skips expressions in unparsable text; these are quoted like words.
        places = {at: self.places.get(at, Position("text", False)) for at in self.spans}
        doubts = self._check_sources(places)
        errors = tuple(error for _, error in sorted(self.errors.items()))
        return ParsedScript(tuple(places.values()), errors, tuple(doubts), pipes)

    def program(self, start: int, end: int, by: str) -> None:
        """Record a part of the script that `by` evaluates as code."""
        self.sources.append(ValueRestriction("program", start, end, by))

    def comment(self, at: int) -> None:
        """Record an expression inside a comment."""
        self.places[at] = Position("comment", True)

    def body(self, start: int, end: int, named: int) -> None:
        """Record a here-document and the position of its command."""
        self.bodies.append((start, end, named))

    def _check_sources(self, positions: Mapping[int, Position]) -> list[Doubt]:
        """Check the template values that are evaluated as code.

        Refuses each value that the shell itself evaluates, and returns a doubt for each value that
        another interpreter evaluates.  `positions` has the expressions of the script by offset.
        """
        reads = self._read_offsets()
        readers: dict[int, str] = {}
        for each in self.sources:
            first, last = bisect_left(reads, (each.start, 0)), bisect_left(reads, (each.end, 0))
            for _, at in reads[first:last]:
                if positions[at].role == "comment":
                    continue
                if each.role == "code":
                    message = f"a shell reads this value as source, for `{each.by}`"
                    self.refuse(at, message, _ENV_WAY)
                readers.setdefault(at, each.by)
        doubts: list[Doubt] = []
        for at, by in readers.items():
            # A number cannot be code, and an expression with an error needs no doubt.
            if at not in self.errors and positions[at].role != "number":
                doubts.append(read_as_source(by, at, self.spans[at] - at))
        return doubts

    def _read_offsets(self) -> list[tuple[int, int]]:
        """Return sorted pairs: an offset at which an expression is read, and the expression's
        offset.

        An expression in a here-document is also read at the offset of its command.
        """
        reads = [(at, at) for at in self.spans]
        for start, end, named in self.bodies:
            reads += [(named, at) for at in self._within(start, end)]
        return sorted(reads)

    def _within(self, start: int, end: int) -> list[int]:
        """Return the offsets of expressions between two offsets."""
        return self.offsets[bisect_left(self.offsets, start) : bisect_left(self.offsets, end)]

    def place(self, at: int, frame: Frame, *, quoted: bool) -> int:
        """Record the position of the expression at `at`, and return the index after the expression."""
        end = self.spans[at]
        self._check_before(at)
        frame.places.add(at)
        so_far = self.text[frame.word : at] if frame.word >= 0 else ""
        subscript = _KEY if frame.array else _SUBSCRIPT
        is_arithmetic = frame.number or subscript.match(so_far) is not None
        is_alone = not quoted and self._is_word(at, end)
        role: Literal["number", "text"] = "number" if is_arithmetic else "text"
        self.places[at] = Position(role, quoted, is_alone)
        return end

    def _check_before(self, at: int) -> None:
        """Report a template expression after a backslash, or after the dollar of another tool's
        syntax.
        """
        before = self.text[at - 1 : at]
        if before == "\\" and self._backslashes_before(at) % 2:
            self.refuse(
                at, "a backslash before a template does not escape it", "remove the backslash"
            )
        elif before == "$" and self.text[at - 2 : at - 1] not in ("$", "\\"):
            self.refuse(at, "`${{ … }}` is not the template syntax of recipe", "write `{{ … }}`")

    def _backslashes_before(self, at: int) -> int:
        return at - len(self.text[:at].rstrip("\\"))

    def _is_word(self, start: int, end: int) -> bool:
        """Return True if a template expression is a whole shell word."""
        before, after = self.text[start - 1 : start], self.text[end : end + 1]
        is_begin = not before or before in _EDGE_BEFORE
        is_end = not after or after in _EDGE_AFTER
        return is_begin and is_end

    def _limit(self, at: int, role: Literal["number", "operand"]) -> None:
        """Restrict the value at `at` to a role, unless a stricter role is set."""
        if self.places[at].role not in ("number", "comment"):
            self.places[at] = self.places[at]._replace(role=role)

    def _rule(self, ruling: ValueRestriction, frame: Frame) -> None:
        """Apply a command's restriction to the values in one of its words."""
        role = ruling.role
        if role in ("code", "program"):
            self.sources.append(ruling)
            return
        if role == "number":
            self.computes(self.text[ruling.start : ruling.end])
        if role in ("name", "number"):
            # The output of a command inside the word is evaluated, too.
            self.sources.append(ruling._replace(role="program"))
        for at in self._within(ruling.start, ruling.end):
            if at not in frame.places:
                continue
            if role == "name":
                self.refuse(at, "a variable name cannot be a template", "use a fixed name")
            elif role == "one":
                self.places[at] = self.places[at]._replace(alone=False)
            elif role == "number":
                self._limit(at, "number")
            elif role == "operand" and self._begins_word(ruling.start, at):
                self._limit(at, "operand")

    def _begins_word(self, start: int, at: int) -> bool:
        """Return True if there are only quotes between the start of a word and `at`."""
        return not self.text[start:at].strip("\"'\\\n")

    def refuse(self, at: int, message: str, fix: str) -> None:
        """Record that no value is allowed at `at`. The first reason is kept."""
        self.errors.setdefault(at, TemplateError(message, at, self.spans[at] - at, fix))

    def plain(self, start: int, end: int, frame: Frame) -> str:
        """Return a word without quotes, with marks in place of template values."""
        parts: list[str] = []
        for at in self._within(start, end):
            mark = VALUE if at in frame.places else INNER
            parts += [self.text[start:at], mark]
            start = self.spans[at]
        return _QUOTING.sub("", "".join((*parts, self.text[start:end])))

    def assign(self, word: CommandWord, frame: Frame) -> None:
        """Record the variable and the template values of an assignment word."""
        found = parse_assignment(word)
        if found is None:
            return
        name, role = found
        subscript = _SET_AT.match(word.text)
        if subscript:
            self._assign_at(name, subscript[1], word, frame)
        has_elements = _ELEMENTS.match(self.text, word.start)
        if not has_elements and declares(frame.words, name, self.arrays):
            # bash reads `declare -a x="(…)"` as elements.
            self._rule(ValueRestriction("number", word.start, word.end, name), frame)
        self._assign_values(name, word.start, word.end, frame)
        if role is not None:
            self._rule(ValueRestriction(role, word.start, word.end, name), frame)

    def _assign_values(self, name: str, start: int, end: int, frame: Frame) -> None:
        """Record the expressions between two offsets as values of a variable."""
        for at in self._within(start, end):
            if at in frame.places:
                self.assigned.append((name, at))

    def _assign_at(self, name: str, subscript: str, word: CommandWord, frame: Frame) -> None:
        """Record an assignment to an array item, whose subscript the shell evaluates."""
        self.computes(subscript, name)
        inside = subscript.count(VALUE) + subscript.count(INNER)
        for at in self._within(word.start, word.end)[:inside]:  # quoted or not
            if at in frame.places:
                self._limit(at, "number")
        if INNER in subscript:
            self.program(word.start, word.end, "a subscript")

    def computes(self, text: str, array: str = "") -> None:
        """Record the variables in a text that the shell evaluates as arithmetic.

        The key of an associative array is not evaluated.
        """
        # The words of a command inside the text are no variables.
        has_command = "$(" in text or "`" in text
        if not has_command and array not in self.keyed:
            self.computed.update(_VARIABLE.findall(text))

    def judge(self, at: int, frame: Frame) -> None:
        """Process a complete simple command: restrictions on its words, and code in its input."""
        words, frame.words = frame.words, []
        closed, frame.closed = frame.closed, None
        head = words[0].text if words else ""
        if head == "case":
            return
        if head in ("for", "select") and len(words) > 3:
            self._assign_values(words[1].text, words[2].start, at, frame)
        for ruling in find_restrictions(words):
            self._rule(ruling, frame)
        self.computed.update(find_evaluated(words))
        found = find_source(words)
        for word in found.words:
            self.program(word.start, word.end, found.by)
        if found.input:
            self._reads_input(found.by, frame.begin, at, frame)
        if closed is None:
            return
        compound, end = closed
        if compound.input:
            self._reads_input(compound.input, compound.begin, compound.at, frame)
            self._reads_input(compound.input, end, at, frame)

    def _reads_input(self, by: str, start: int, end: int, frame: Frame) -> None:
        """Record that `by` evaluates its input as code, from a pipe or redirections."""
        self.program(start, end, by)
        for compound in frame.compounds:
            compound.input = by
        if frame.feeder >= 0:
            line_end = self.text.find("\n", end)
            if line_end < 0:
                line_end = len(self.text)
            self.program(frame.feeder, line_end, by)


def _find_arrays(text: str) -> set[str]:
    """Return the variables that a script may use as arrays."""
    found: set[str] = set()
    for one, several in _ARRAY.findall(text):
        if one:
            found.add(one)
        found.update(_VARIABLE.findall(several))
    return found
