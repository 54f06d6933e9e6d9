"""Put values into a shell script.  The shell that runs the script never parses a value as source.  Knows how a shell reads quotes.

Every expression becomes a variable that is set in front of the script: `"${_recipe_1}"` where words are split, `${_recipe_1}` where quotes already
hold.  A shell does not read the value of a variable as source, so a wrong guess of the reader below costs word splitting, never an injection.  Where
a shell does evaluate a value (arithmetic, names of variables, `eval`), only a whole number can stand, or nothing: `interpreters` knows the commands.
/bin/sh may be bash, so what bash evaluates counts for `sh` too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from .interpreters import INNER, VALUE, Ruling, Word, assignment, evaluated, rulings, source
from .template import Reads, Scope, TemplateError, expressions, has, text_of


class Doubt(NamedTuple):
    """What in a script is probably not meant."""

    code: str
    message: str
    offset: int
    length: int
    fix: str = ""


def script(text: str, scope: Scope, reads: Reads | None = None, *, bash: bool = False) -> str:
    """The whole script: one assignment for each value, and `text` with variables where its expressions were."""
    if not has(text):
        return text
    reading = _read(text, bash)
    if reading.errors:
        raise reading.errors[0]
    prefix = "_recipe"
    while prefix in text:
        prefix += "_"
    prologue: list[str] = []
    parts: list[str] = []
    end = 0
    for number, (expression, place) in enumerate(zip(expressions(text), reading.places, strict=True), 1):
        parts.append(text[end : expression.offset])
        end = expression.offset + expression.length
        variable = f"{prefix}_{number}"
        if place.role == "comment":  # it stays unset: null is no mistake where nothing is read
            parts.append(f"${{{variable}}}")
            continue
        value = expression.value(scope, reads)
        values = {variable: value}
        if isinstance(value, (list, tuple)) and place.alone:
            values = {f"{variable}_{i}": each for i, each in enumerate(value, 1)}
        words: list[str] = []
        for name, each in values.items():
            try:
                word = text_of(each)
            except TemplateError as error:
                raise TemplateError(str(error), expression.offset, expression.length, error.fix) from None
            if "\0" in word:
                raise TemplateError("a NUL character cannot be in a script", expression.offset, expression.length)
            if place.role == "number" and not _NUMBER.fullmatch(word):
                message = f"only a whole number can stand here, not `{word[:40]}`: a shell would evaluate it"
                raise TemplateError(message, expression.offset, expression.length)
            if place.role == "operand" and word.startswith("-"):
                message = f"`{word[:40]}` would be an option of this command"
                raise TemplateError(message, expression.offset, expression.length, "write `printf '%s' {{ … }}`, or `--` in front of it")
            prologue.append(f"{name}={_single(word)}\n")
            plain = f"${{{name}}}"
            if place.quoted:
                words.append(f"({plain})" if place.role == "number" and word.startswith("-") else plain)
            else:
                words.append(f'"{plain}"')
        parts.append(" ".join(words))
    parts.append(text[end:])
    return "".join(prologue) + "".join(parts)


def errors(text: str, *, bash: bool = False) -> tuple[TemplateError, ...]:
    """Every expression of a script that stands where no value can, whatever its value is; or the first that is none."""
    try:
        return _read(text, bash).errors if has(text) else ()
    except TemplateError as error:
        return (error,)


def warnings(text: str, bash: bool = False) -> list[Doubt]:
    """What is probably not meant; nothing where an expression is none."""
    try:
        reading = _read(text, bash)
    except TemplateError:
        return []
    message = "a failure in front of this pipe goes unnoticed: say `shell: bash`"
    found = [] if bash else [Doubt("pipe", message, at, 1) for at in reading.pipes]
    return sorted([*found, *reading.warnings], key=lambda each: each.offset)


def doubts_of_arguments(items: Sequence[str]) -> Iterator[tuple[int, Doubt]]:
    """Which of the arguments of a command are source for the interpreter that it starts, and what to do about it."""
    words: list[Word] = []
    for at, item in enumerate(items):
        text, end = "", 0
        try:
            for each in expressions(item):
                text, end = text + item[end : each.offset] + VALUE, each.offset + each.length
        except TemplateError:
            return
        words.append(Word(at, at + 1, text + item[end:]))
    found = source(words)
    for at in dict.fromkeys(word.start for word in found.words if VALUE in word.text):
        yield at, Doubt("template-in-code", _DOUBT.format(found.by), 0, len(items[at]), _ENV_WAY)


# ---- reading a script ----

_NUMBER = re.compile(r"[+-]?[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_SUBSCRIPT = re.compile(r"\{?[A-Za-z_][A-Za-z0-9_]*\[(?!.*\]\+?=)", re.DOTALL)
_KEY = re.compile(r"\[(?!.*\]\+?=)", re.DOTALL)
_COMPUTED = re.compile(r"\$\{?!?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*)")
_VARIABLE = re.compile(r"(?<![#A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_]*")
_SET_AT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[(.*)\]\+?=", re.DOTALL)
_KEYED = re.compile(r"\b(?:declare|typeset|local)[ \t]+-[A-Za-z]*A[A-Za-z]*[ \t]+([A-Za-z_][A-Za-z0-9_]*)")
_QUOTING = re.compile(r"\\\n|[\"']|\\(?=.)|\$(?=[\"'])")
_FILE_NUMBER = re.compile(r"[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\}")
_AGAIN = frozenset({"then", "do", "else", "elif", "!", "time", "coproc"})  # a command follows
_OPENS = frozenset({"if", "while", "until", "for", "select", "{"})
_CLOSES = frozenset({"fi", "done", "}"})
_EDGE_BEFORE = frozenset(" \t\n;&|(<>`")
_EDGE_AFTER = frozenset(" \t\n;&|)<>`")
_DOUBT = "{} may read this value as source, and then runs what it says"
_ENV_WAY = "give it a name in `env:`, and let what runs there read it: `bash -c 'echo \"$NAME\"'`"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one expression stands.  `quoted`: the script already quotes it; `alone`: it is a whole word, so a list may be several."""

    role: Literal["text", "number", "operand", "comment"]
    quoted: bool
    alone: bool = False


@dataclass(frozen=True, slots=True)
class _Reading:
    places: tuple[_Place, ...]
    errors: tuple[TemplateError, ...]
    warnings: tuple[Doubt, ...]
    pipes: tuple[int, ...]


@dataclass(slots=True)
class _Compound:
    """`( )`, `{ }`, `if`, a loop or `case`, from `at` on, in a pipeline that began at `begin`.  `input`: what in it reads its input as source."""

    begin: int
    at: int
    input: str = ""


@dataclass(slots=True)
class _Frame:
    """One list of commands: the script, the inside of `$( )`, `<( )` or backticks, or the elements of an array."""

    close: str
    array: bool = False
    number: bool = False  # what is read may be arithmetic
    feeder: int = -1  # where the command began whose output it reads: it is a `>( )`
    places: set[int] = field(default_factory=set)  # its expressions, without those of frames in it
    words: list[Word] = field(default_factory=list)  # of the simple command so far
    word: int = -1  # where the word being read began; -1 between words
    begin: int = -1  # where the pipeline being read began; -1 between pipelines
    piped: bool = False  # nothing was read yet behind a `|`
    redirect: str = ""  # the operator in front of the next word
    cases: list[str] = field(default_factory=list)  # subject, pattern or body, innermost last
    depth: int = 0
    compounds: list[_Compound] = field(default_factory=list)  # that are open
    closed: tuple[_Compound, int] | None = None  # the one that was just closed, and where
    pending: list[tuple[str, bool, bool, int]] = field(default_factory=list)  # here-documents: delimiter, quoted, strips tabs, where

    @property
    def bare(self) -> bool:
        """Whether a command is still to come."""
        return all(word.redirect for word in self.words)

    @property
    def testing(self) -> bool:
        """Whether this is the inside of `[[ ]]`."""
        return not self.bare and self.words[0].text == "[["


@lru_cache(maxsize=1 << 14)
def _read(text: str, bash: bool) -> _Reading:
    return _Reader(text, bash).read()


class _Reader:
    """A shell's own order of reading, with expressions as atoms."""

    def __init__(self, text: str, bash: bool) -> None:
        self.text = text
        self.bash = bash
        self.spans: Mapping[int, int] = {each.offset: each.offset + each.length for each in expressions(text)}
        self.offsets = list(self.spans)
        self.places: dict[int, _Place] = {}
        self.errors: dict[int, TemplateError] = {}
        self.pipes: list[int] = []
        self.sources: list[Ruling] = []  # code, and what other interpreters read
        self.bodies: list[tuple[int, int, int]] = []  # of here-documents, and where their command named them
        self.assigned: list[tuple[str, int]] = []  # variables, and values in what they are set to
        self.keyed = set(_KEYED.findall(text))
        self.computed: set[str] = set()  # variables whose value a shell evaluates

    def read(self) -> _Reading:
        try:
            self._commands(0, _Frame(""))
        except RecursionError:
            raise TemplateError("this script is nested too deeply") from None
        for name, at in self.assigned:
            if name in self.computed:
                self._limit(at, "number")
        # What the reader skipped stands in text it could not make sense of: quoted like a word.
        places = {at: self.places.get(at, _Place("text", False)) for at in self.spans}
        doubts = self._sourced(places)
        errors = tuple(error for _, error in sorted(self.errors.items()))
        return _Reading(tuple(places.values()), errors, tuple(doubts), tuple(self.pipes))

    def _sourced(self, places: Mapping[int, _Place]) -> list[Doubt]:
        """Refuse each value that is source for this shell; a warning for one that is source for another interpreter."""
        stands = [(at, at) for at in self.spans]
        stands += [(named, at) for start, end, named in self.bodies for at in self._within(start, end)]
        stands.sort()
        readers: dict[int, str] = {}
        for each in self.sources:
            for _, at in stands[bisect_left(stands, (each.start, 0)) : bisect_left(stands, (each.end, 0))]:
                if places[at].role == "comment":
                    continue
                if each.role == "code":
                    self._refuse(at, f"a shell reads this value as source, for `{each.by}`", _ENV_WAY)
                readers.setdefault(at, each.by)
        return [
            Doubt("template-in-code", _DOUBT.format(by), at, self.spans[at] - at, _ENV_WAY)
            for at, by in readers.items()
            if at not in self.errors and places[at].role != "number"
        ]

    def _within(self, start: int, end: int) -> list[int]:
        """The expressions between two offsets."""
        return self.offsets[bisect_left(self.offsets, start) : bisect_left(self.offsets, end)]

    # -- what every context shares --

    def _expression(self, at: int, frame: _Frame, *, quoted: bool) -> int:
        end = self.spans[at]
        before, after = self.text[at - 1 : at], self.text[end : end + 1]
        if before == "\\" and (at - len(self.text[:at].rstrip("\\"))) % 2:
            self._refuse(at, "a backslash in front of a template does nothing good", "leave it out")
        elif before == "$" and self.text[at - 2 : at - 1] not in ("$", "\\"):
            self._refuse(at, "`${{ … }}` is another tool's spelling", "write `{{ … }}`")
        alone = not quoted and (not before or before in _EDGE_BEFORE) and (not after or after in _EDGE_AFTER)
        frame.places.add(at)
        so_far = self.text[frame.word : at] if frame.word >= 0 else ""
        subscript = (_KEY if frame.array else _SUBSCRIPT).match(so_far) is not None
        self.places[at] = _Place("number" if frame.number or subscript else "text", quoted, alone)
        return end

    def _limit(self, at: int, role: Literal["number", "operand"]) -> None:
        if self.places[at].role not in ("number", "comment"):
            self.places[at] = replace(self.places[at], role=role)

    def _rule(self, ruling: Ruling, frame: _Frame) -> None:
        """What a command wants of the values in one of its words."""
        role = ruling.role
        if role in ("code", "program"):
            self.sources.append(ruling)
            return
        if role == "number":
            self._computes(self.text[ruling.start : ruling.end])
        if role in ("name", "number"):  # what a command inside the word prints is evaluated, too
            self.sources.append(ruling._replace(role="program"))
        for at in self._within(ruling.start, ruling.end):
            if at not in frame.places:
                continue
            if role == "name":
                self._refuse(at, "a variable's name cannot be a value", "use a fixed name")
            elif role == "one":
                self.places[at] = replace(self.places[at], alone=False)
            elif role == "number" or (role == "operand" and not self.text[ruling.start : at].strip("\"'\\\n")):
                self._limit(at, role)

    def _refuse(self, at: int, message: str, fix: str) -> None:
        self.errors.setdefault(at, TemplateError(message, at, self.spans[at] - at, fix))

    def _dollar(self, at: int, frame: _Frame, *, quoted: bool, heredoc: bool = False) -> int:
        text = self.text
        if text.startswith("$((", at) and self._ends_twice(at + 3):
            return self._arithmetic(at + 3, frame)
        if text.startswith("$(", at):
            return self._commands(at + 2, _Frame(")", number=text.startswith("$((", at)))
        if text.startswith("${", at) and at + 1 not in self.spans:
            return self._parameter(at + 2, frame, quoted=quoted, heredoc=heredoc)
        if text.startswith("$[", at):
            return self._arithmetic(at + 2, frame, "]")
        return at + 1

    def _ends_twice(self, at: int) -> bool:
        """Whether the `((` before `at` is closed by `))`: else it is a subshell in a substitution."""
        depth = 0
        for position, char in self._characters(at):
            if char == "(":
                depth += 1
            elif char == ")":
                if not depth:
                    return self.text.startswith("))", position)
                depth -= 1
        return False

    def _characters(self, at: int) -> Iterator[tuple[int, str]]:
        """From `at` on, expressions and escaped characters left out."""
        while at < len(self.text):
            if at in self.spans:
                at = self.spans[at]
            elif self.text[at] == "\\":
                at = self._escaped(at)
            else:
                yield at, self.text[at]
                at += 1

    def _escaped(self, at: int) -> int:
        """Behind a backslash and what it takes with it; an expression it never takes."""
        return at + 1 if at + 1 in self.spans else at + 2

    # -- contexts --

    def _single(self, at: int, ansi: bool = False) -> int:
        while at < len(self.text):
            if at in self.spans:
                self._refuse(at, "a value cannot stand inside single quotes", "use double quotes")
                at = self.spans[at]
            elif self.text[at] == "'":
                return at + 1
            else:
                at += 2 if ansi and self.text[at] == "\\" and at + 1 not in self.spans else 1
        return at

    def _double(self, at: int, frame: _Frame) -> int:
        return self._until('"', at, frame, quoted=True)

    def _until(self, close: str, at: int, frame: _Frame, *, quoted: bool, number: bool = False, heredoc: bool = False, singles: bool = False) -> int:
        """Text in which only expansions mean something, up to `close`.  `singles`: single quotes quote here."""
        text = self.text
        outside, frame.number = frame.number, frame.number or number
        while at < len(text):
            char = text[at]
            if at in self.spans:
                at = self._expression(at, frame, quoted=quoted)
            elif char == close:
                at += 1
                break
            elif char == "\\":
                at = self._escaped(at)
            elif char == "$" and singles and self.bash and text.startswith("$'", at):
                at = self._single(at + 2, ansi=True)
            elif char == "$":
                at = self._dollar(at, frame, quoted=quoted and not singles, heredoc=heredoc)
            elif char == "`":
                if frame.close == "`":
                    break
                at = self._commands(at + 1, _Frame("`"))
            elif char == "'" and singles:
                at = self._single(at + 1)
            elif char == '"' and not heredoc:
                at = self._double(at + 1, frame)
            else:
                at += 1
        frame.number = outside
        return at

    def _parameter(self, at: int, frame: _Frame, *, quoted: bool, heredoc: bool) -> int:
        text = self.text
        if text[at : at + 1] in ("!", "#") and text[at + 1 : at + 2] not in ("}", ""):
            at += 1
        if at in self.spans:
            self._refuse(at, "a variable's name cannot be a value", "use a fixed name")
        name = _NAME.match(text, at)
        at = name.end() if name else at
        if name and (text[name.start() - 1] == "!" or text.startswith("@P}", at)):
            self.computed.add(name[0])
        if text.startswith("[", at):
            start, at = at, self._until("]", at + 1, frame, quoted=True, number=True)
            self._computes(text[start:at], name[0] if name else "")
            self.sources.append(Ruling("program", start, at, "a subscript"))
        sign = text[at : at + 1]
        if sign == ":" and text[at + 1 : at + 2] not in ("-", "=", "+", "?"):
            start, at = at, self._until("}", at + 1, frame, quoted=True, number=True)
            self._computes(text[start:at])
            self.sources.append(Ruling("program", start, at, "${…:…}"))
            return at
        if sign in ("#", "%", "/", "^", ","):  # a pattern: quotes count in it wherever it stands, and take away its magic
            return self._until("}", at + 1, frame, quoted=False, singles=True)
        return self._until("}", at, frame, quoted=quoted, heredoc=heredoc, singles=not quoted)

    def _arithmetic(self, at: int, frame: _Frame, close: str = "))") -> int:
        depth = 0
        outside, frame.number = frame.number, True
        while at < len(self.text):
            char = self.text[at]
            name = _COMPUTED.match(self.text, at)
            if name:
                self.computed.add(name[1] or name[2])
            if at in self.spans:
                at = self._expression(at, frame, quoted=True)
            elif not depth and self.text.startswith(close, at):
                at += len(close)
                break
            elif char == "\\":
                at = self._escaped(at)
            elif char in "$`":
                start = at
                at = self._dollar(at, frame, quoted=True) if char == "$" else self._commands(at + 1, _Frame("`"))
                self.sources.append(Ruling("program", start, at, "$(( ))"))
            elif name:
                at = name.end()
            else:
                depth += {close[0]: -1, "(" if close == "))" else "[": 1}.get(char, 0)
                at += 1
        frame.number = outside
        return at

    def _comment(self, at: int, frame: _Frame) -> int:
        while at < len(self.text) and self.text[at] != "\n" and not (frame.close == "`" and self.text[at] == "`"):
            if at in self.spans:
                self.places[at] = _Place("comment", True)
                at = self.spans[at]
            else:
                at += 1
        return at

    def _commands(self, at: int, frame: _Frame) -> int:
        text = self.text
        while at < len(text):
            char = text[at]
            if at in self.spans:
                self._begin(at, frame)
                at = self._expression(at, frame, quoted=False)
                continue
            handle = _IN_COMMANDS.get(char)
            if handle is not None:
                found = handle(self, at, frame)
                if found < 0:
                    return ~found
                if found > at:
                    at = found
                    continue
            self._begin(at, frame)
            at += 1
        self._end_command(at, frame)
        return at

    def _end_word(self, at: int, frame: _Frame) -> None:
        if frame.word < 0:
            return
        raw = self.text[frame.word : at]
        word = Word(frame.word, at, self._plain(frame.word, at, frame), frame.redirect)
        frame.word, frame.redirect = -1, ""
        state = frame.cases[-1] if frame.cases else ""
        if word.redirect:
            frame.words.append(word)
        elif frame.array:
            if raw.startswith("[") and INNER in word.text:
                self.sources.append(Ruling("program", word.start, word.end, "a subscript"))
        elif state == "subject" and raw == "in":
            frame.cases[-1] = "pattern"
            frame.words.clear()
        elif raw == "esac" and (state == "pattern" or (state == "body" and frame.bare)):
            frame.cases.pop()
            self._close(at, frame)
        elif not frame.bare:
            self._next_word(raw, word, frame)
        elif raw == "case" or raw in _OPENS:
            self._open(word.start, frame)
            if raw == "case":
                frame.cases.append("subject")
            if raw in ("case", "for", "select"):
                frame.words.append(word)
        elif raw in _CLOSES:
            self._close(at, frame)
        elif raw not in _AGAIN and not raw.startswith("-"):  # `time -p`
            self._assign(word, frame)
            if assignment(word) is None:
                frame.words.append(word)

    def _next_word(self, raw: str, word: Word, frame: _Frame) -> None:
        head = frame.words[0].text
        if (head in ("for", "select") and raw in ("do", "{")) or head == "function":
            self._judge(word.start, frame)  # a command follows
            return
        frame.words.append(word)
        if head == "[[" and raw == "]]":
            self._judge(word.end, frame)
        elif raw != word.text or "=" in raw:
            self._assign(word, frame)

    def _plain(self, start: int, end: int, frame: _Frame) -> str:
        """A word without its quotes, with marks for values."""
        parts: list[str] = []
        for at in self._within(start, end):
            parts += [self.text[start:at], VALUE if at in frame.places else INNER]
            start = self.spans[at]
        return _QUOTING.sub("", "".join((*parts, self.text[start:end])))

    def _assign(self, word: Word, frame: _Frame) -> None:
        """Note which variable a word sets to which values."""
        found = assignment(word)
        if found is None:
            return
        name, role = found
        subscript = _SET_AT.match(word.text)
        if subscript:
            self._computes(subscript[1], name)
            if INNER in subscript[1]:
                self.sources.append(Ruling("program", word.start, word.end, "a subscript"))
        self.assigned += [(name, at) for at in self._within(word.start, word.end) if at in frame.places]
        if role is not None:
            self._rule(Ruling(role, word.start, word.end, name), frame)

    def _computes(self, text: str, array: str = "") -> None:
        """Note the variables in what a shell computes; a key of an associative array is not computed."""
        if "$(" not in text and "`" not in text and array not in self.keyed:
            self.computed.update(_VARIABLE.findall(text))

    def _open(self, at: int, frame: _Frame) -> None:
        frame.compounds.append(_Compound(frame.begin if frame.begin >= 0 else at, at))
        frame.begin = -1

    def _close(self, at: int, frame: _Frame) -> None:
        """A compound command has ended; only redirections can follow."""
        frame.words.clear()
        if frame.compounds:
            frame.closed = (frame.compounds.pop(), at)
            frame.begin = frame.closed[0].begin

    def _judge(self, at: int, frame: _Frame) -> None:
        """A simple command is complete: what it wants of its values, and what reads them as source."""
        words, frame.words = frame.words, []
        closed, frame.closed = frame.closed, None
        if words and words[0].text in ("for", "select") and len(words) > 3:
            self.assigned += [(words[1].text, each) for each in self._within(words[2].start, at) if each in frame.places]
        if words and words[0].text == "case":
            return
        for ruling in rulings(words):
            self._rule(ruling, frame)
        self.computed.update(evaluated(words))
        found = source(words)
        self.sources += [Ruling("program", word.start, word.end, found.by) for word in found.words]
        if found.input:
            self._reads_input(found.by, frame.begin, at, frame)
        if closed and closed[0].input:
            self._reads_input(closed[0].input, closed[0].begin, closed[0].at, frame)
            self._reads_input(closed[0].input, closed[1], at, frame)

    def _reads_input(self, by: str, start: int, end: int, frame: _Frame) -> None:
        """Something reads as source what the commands in front of it print, and what is redirected into it."""
        self.sources.append(Ruling("program", start, end, by))
        for compound in frame.compounds:
            compound.input = by
        if frame.feeder >= 0:
            line_end = self.text.find("\n", end)
            self.sources.append(Ruling("program", frame.feeder, len(self.text) if line_end < 0 else line_end, by))

    def _end_command(self, at: int, frame: _Frame, *, piped: bool = False) -> None:
        self._end_word(at, frame)
        if frame.testing and at < len(self.text):
            return
        self._judge(at, frame)
        frame.piped = piped
        if not piped:
            frame.begin = -1

    # Each of these reads what begins with its character in a list of commands: the index behind it, `at` when it is an ordinary character,
    # or the complement of an index when the list ends there.

    def _on_space(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        return at + 1

    def _on_newline(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        if not (frame.cases and frame.cases[-1] == "subject"):
            self._end_command(at, frame, piped=frame.piped and frame.bare)
        at += 1
        pending, frame.pending = frame.pending, []
        for delimiter, quoted, tabs, named in pending:
            at = self._here_document(at, frame, delimiter, quoted, tabs, named)
        return at

    def _on_backslash(self, at: int, frame: _Frame) -> int:
        if not self.text.startswith("\\\n", at):
            self._begin(at, frame)
        return self._escaped(at)

    def _on_single(self, at: int, frame: _Frame) -> int:
        self._begin(at, frame)
        return self._single(at + 1)

    def _on_double(self, at: int, frame: _Frame) -> int:
        self._begin(at, frame)
        return self._double(at + 1, frame)

    def _on_dollar(self, at: int, frame: _Frame) -> int:
        self._begin(at, frame)
        if self.text.startswith("$'", at):
            return self._single(at + 2, ansi=self.bash)
        return self._dollar(at, frame, quoted=False)

    def _on_backtick(self, at: int, frame: _Frame) -> int:
        if frame.close == "`":
            self._end_command(at, frame)
            return ~(at + 1)
        self._begin(at, frame)
        return self._commands(at + 1, _Frame("`"))

    def _on_hash(self, at: int, frame: _Frame) -> int:
        return self._comment(at, frame) if frame.word < 0 else at

    def _on_open(self, at: int, frame: _Frame) -> int:
        if frame.word >= 0 and self.text[at - 1] == "=":
            return self._commands(at + 1, _Frame(")", array=True, places=frame.places))
        if frame.testing:
            self._end_word(at, frame)
            frame.depth += 1
            return at + 1
        if frame.cases and frame.cases[-1] == "pattern" and frame.word < 0:
            return at + 1
        if self.text.startswith("((", at) and frame.word < 0:
            if self._ends_twice(at + 2):
                return self._arithmetic(at + 2, frame)
            self._end_command(at, frame, piped=True)
            return self._commands(at + 1, _Frame(")", number=True))
        self._end_word(at, frame)
        self._judge(at, frame)
        frame.depth += 1
        self._open(at, frame)
        return at + 1

    def _on_close(self, at: int, frame: _Frame) -> int:
        self._end_command(at, frame)
        if frame.cases and frame.cases[-1] == "pattern":
            frame.cases[-1] = "body"
        elif frame.depth:
            frame.depth -= 1
            if not frame.testing:
                self._close(at + 1, frame)
        elif frame.close == ")":
            return ~(at + 1)
        return at + 1

    def _on_semicolon(self, at: int, frame: _Frame) -> int:
        self._end_command(at, frame)
        if self.text.startswith((";;", ";&"), at) and frame.cases:
            frame.cases[-1] = "pattern"
            return at + (3 if self.text.startswith(";;&", at) else 2)
        return at + 1

    def _on_pipe(self, at: int, frame: _Frame) -> int:
        if frame.cases and frame.cases[-1] == "pattern":
            self._end_word(at, frame)
            return at + 1
        if self.text[at - 1 : at] == ">":
            return at + 1
        piped = not self.text.startswith("||", at)
        self._end_command(at, frame, piped=piped)
        if not piped:
            return at + 2
        if frame.testing:
            return at + 1
        self.pipes.append(at)
        return at + (2 if self.text.startswith("|&", at) else 1)

    def _on_ampersand(self, at: int, frame: _Frame) -> int:
        if self.text[at - 1 : at] in ("<", ">"):
            frame.redirect += "&"
        elif self.text.startswith("&>", at):
            self._end_word(at, frame)
        else:
            self._end_command(at, frame)
        return at + 1

    def _on_less(self, at: int, frame: _Frame) -> int:
        if self.text.startswith("<<<", at):
            return self._redirect(at, frame, "<<<")
        if self.text.startswith("<<", at):
            self._redirect(at, frame, "")
            return self._here(at + 2, frame)
        return self._on_greater(at, frame)

    def _on_greater(self, at: int, frame: _Frame) -> int:
        if self.text.startswith("(", at + 1):
            self._begin(at, frame)
            return self._commands(at + 2, _Frame(")", feeder=frame.begin if self.text[at] == ">" else -1))
        return self._redirect(at, frame, self.text[at])

    def _redirect(self, at: int, frame: _Frame, operator: str) -> int:
        """An operator in front of a word; what is attached to it in front is the number of a file."""
        if frame.word >= 0 and _FILE_NUMBER.fullmatch(self.text, frame.word, at):
            frame.word = -1
        self._end_word(at, frame)
        if frame.begin < 0:
            frame.begin = at
        frame.redirect = "" if frame.testing else operator
        return at + max(1, len(operator))

    def _begin(self, at: int, frame: _Frame) -> None:
        if frame.word < 0:
            frame.word = at
        frame.piped = False
        if frame.begin < 0:
            frame.begin = at

    # -- here-documents --

    def _here(self, at: int, frame: _Frame) -> int:
        """`<<` was read: its delimiter, for the next newline."""
        text, named = self.text, at - 1
        tabs = text.startswith("-", at)
        at += tabs
        while text[at : at + 1] in (" ", "\t"):
            at += 1
        delimiter, quoted = "", False
        while at < len(text) and text[at] not in " \t\n;&|()<>":
            if at in self.spans:
                self._refuse(at, "a value cannot end a here-document", "use a fixed word")
                at = self.spans[at]
            elif text[at] in "'\"":
                close = text.find(text[at], at + 1)
                close = len(text) if close < 0 else close
                delimiter, quoted, at = delimiter + text[at + 1 : close], True, close + 1
            elif text[at] == "\\":
                delimiter, quoted, at = delimiter + text[at + 1 : at + 2], True, at + 2
            else:
                delimiter, at = delimiter + text[at], at + 1
        frame.pending.append((delimiter, quoted, tabs, named))
        return at

    def _here_document(self, at: int, frame: _Frame, delimiter: str, quoted: bool, tabs: bool, named: int) -> int:
        text = self.text
        end, joined = at, False
        while end < len(text):
            line_end = next((position for position in self._line_ends(end)), len(text))
            line = text[end:line_end]
            if not joined and (line.lstrip("\t") if tabs else line) == delimiter:
                break
            joined = not quoted and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            end = line_end + 1
        inner = _Frame("")
        self.bodies.append((at, end, named))
        while at < min(end, len(text)):
            char = text[at]
            if at in self.spans:
                if quoted:
                    self._refuse(at, "a value cannot stand in a here-document with a quoted delimiter", f"write `<<{delimiter}` without quotes")
                    at = self.spans[at]
                else:
                    at = self._expression(at, inner, quoted=True)
            elif quoted:
                at += 1
            elif char == "\\":
                at = self._escaped(at)
            elif char == "$":
                at = self._dollar(at, inner, quoted=True, heredoc=True)
            elif char == "`":
                at = self._commands(at + 1, _Frame("`"))
            else:
                at += 1
        line_end = text.find("\n", end)
        return len(text) if end >= len(text) or line_end < 0 else line_end + 1

    def _line_ends(self, at: int) -> Iterator[int]:
        while at < len(self.text):
            if at in self.spans:
                at = self.spans[at]
            else:
                if self.text[at] == "\n":
                    yield at
                at += 1


_IN_COMMANDS: Mapping[str, Callable[[_Reader, int, _Frame], int]] = {
    " ": _Reader._on_space,
    "\t": _Reader._on_space,
    "\n": _Reader._on_newline,
    "\\": _Reader._on_backslash,
    "'": _Reader._on_single,
    '"': _Reader._on_double,
    "$": _Reader._on_dollar,
    "`": _Reader._on_backtick,
    "#": _Reader._on_hash,
    "(": _Reader._on_open,
    ")": _Reader._on_close,
    ";": _Reader._on_semicolon,
    "|": _Reader._on_pipe,
    "&": _Reader._on_ampersand,
    "<": _Reader._on_less,
    ">": _Reader._on_greater,
}


def _single(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
