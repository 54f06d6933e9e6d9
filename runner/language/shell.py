"""Put values into a shell script without their ever becoming shell source.  Knows how a shell reads quotes, not what a script does.

Every expression becomes a variable that is set in front of the script: `"${_recipe_1}"` where words are split, `${_recipe_1}` where quotes already
hold.  A shell does not read the value of a variable as source, so a wrong guess of the reader below costs word splitting, never an injection.  The
places where a shell does read it (arithmetic in bash, `eval`, `sh -c "…"`) take numbers only, or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, TypeAlias

from .template import Reads, Scope, TemplateError, expressions, has, text_of

Warning_: TypeAlias = tuple[str, str, int, int]


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


def warnings(text: str, bash: bool = False) -> list[Warning_]:
    """(code, message, offset, length) of what is probably not meant; nothing where an expression is none."""
    try:
        reading = _read(text, bash)
    except TemplateError:
        return []
    found = [] if bash else [("pipe", "a failure in front of this pipe goes unnoticed: say `shell: bash`", at, 1) for at in reading.pipes]
    return sorted([*found, *reading.warnings], key=lambda each: each[2])


# ---- reading a script ----

_NUMBER = re.compile(r"[+-]?[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\[[^]]*\])?\+?=")
_SUBSCRIPT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\[[^]]*\Z")
_COMPARES_NUMBERS = re.compile(r"\s-(?:eq|ne|lt|le|gt|ge)\s")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "su", "busybox"})
_INTERPRETERS = re.compile(r"python[0-9.]*|perl|ruby|node|awk|gawk|mawk|sed|jq|ssh|psql|sqlite3")
_AGAIN = frozenset({"then", "do", "else", "elif", "if", "while", "until", "!", "{", "time"})  # a command follows
_NAMES_VARIABLES = frozenset({"unset", "declare", "typeset", "local", "read", "let"})
_EDGE_BEFORE = frozenset(" \t\n;&|(<>`")
_EDGE_AFTER = frozenset(" \t\n;&|)<>`")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one expression stands.  `quoted`: the script already quotes it; `alone`: it is a whole word, so a list may be several."""

    role: Literal["value", "number", "comment"]
    quoted: bool
    alone: bool = False


@dataclass(frozen=True, slots=True)
class _Reading:
    places: tuple[_Place, ...]
    errors: tuple[TemplateError, ...]
    warnings: tuple[Warning_, ...]
    pipes: tuple[int, ...]


@dataclass(slots=True)
class _Frame:
    """One list of commands: the script, or the inside of `$( )`, `<( )` or backticks."""

    close: str
    code: bool  # what it prints is read as source further out
    words: list[str] = field(default_factory=list)  # of the simple command so far
    word: int = -1  # where the word being read began; -1 between words
    cases: list[str] = field(default_factory=list)  # subject, pattern or body, innermost last
    depth: int = 0
    pending: list[tuple[str, bool, bool, bool]] = field(default_factory=list)  # here-documents: delimiter, quoted, strips tabs, feeds a shell
    arithmetic_test: bool = False  # inside a `[[ ]]` that compares numbers


@lru_cache(maxsize=1 << 14)
def _read(text: str, bash: bool) -> _Reading:
    return _Reader(text, bash).read()


class _Reader:
    """A shell's own order of reading, with expressions as atoms."""

    def __init__(self, text: str, bash: bool) -> None:
        self.text = text
        self.bash = bash
        self.spans: Mapping[int, int] = {each.offset: each.offset + each.length for each in expressions(text)}
        self.places: dict[int, _Place] = {}
        self.errors: list[TemplateError] = []
        self.warnings: list[Warning_] = []
        self.pipes: list[int] = []

    def read(self) -> _Reading:
        try:
            self._commands(0, _Frame("", False))
        except RecursionError:
            raise TemplateError("this script is nested too deeply") from None
        # What the reader skipped stands in text it could not make sense of: quoted like a word.
        places = tuple(self.places.get(start, _Place("value", False)) for start in self.spans)
        return _Reading(places, tuple(sorted(self.errors, key=lambda each: each.offset)), tuple(self.warnings), tuple(self.pipes))

    # -- what every context shares --

    def _expression(self, at: int, frame: _Frame, *, quoted: bool, number: bool = False) -> int:
        end = self.spans[at]
        before, after = self.text[at - 1 : at], self.text[end : end + 1]
        if before == "\\" and (at - len(self.text[:at].rstrip("\\"))) % 2:
            self._refuse(at, "a backslash in front of a template does nothing good", "leave it out")
        elif before == "$" and self.text[at - 2 : at - 1] not in ("$", "\\"):
            self._refuse(at, "`${{ … }}` is another tool's spelling", "write `{{ … }}`")
        alone = not quoted and (not before or before in _EDGE_BEFORE) and (not after or after in _EDGE_AFTER)
        role: Literal["value", "number"] = "number" if number else "value"
        if not number:
            role = self._role(at, frame)
        self.places[at] = _Place(role, quoted, alone)
        return end

    def _role(self, at: int, frame: _Frame) -> Literal["value", "number"]:
        """What a value may be where it stands in a command: some commands read their arguments as source."""
        words = frame.words
        first = words[0] if words else ""
        if frame.code or self._is_code(words):
            self._refuse(at, "a value cannot be part of a command that a shell reads again", "pass it as an argument: `sh -c '… \"$1\"' sh {{ … }}`")
        elif any(_INTERPRETERS.fullmatch(_base(each)) for each in words) and words[-1] in ("-c", "-e", "-ne", "-pe") and frame.word >= 0:
            self._warn(at, "template-in-code", "this value becomes part of a program: pass it as an argument or in the environment")
        elif first == "ssh" and len(words) > 1:
            self._warn(at, "template-in-code", "a shell on the other side reads this value again: send it as input")
        if not self.bash:
            return "value"
        so_far = self.text[frame.word : at] if frame.word >= 0 else ""
        if frame.arithmetic_test or first == "let" or _SUBSCRIPT.fullmatch(so_far):
            return "number"
        if first in _NAMES_VARIABLES:
            if first != "read" and any(each.startswith("-") and "i" in each for each in words[1:]):
                return "number"
            if "=" not in so_far and words[-1] not in ("-p", "-d", "-t", "-n", "-N", "-u") and not self._redirected(frame, at):
                self._refuse(at, "a variable's name cannot be a value", "use a fixed name")
        elif words and words[-1] == "-v" and first in ("test", "[", "[[", "printf"):
            self._refuse(at, "a variable's name cannot be a value", "use a fixed name")
        return "value"

    def _redirected(self, frame: _Frame, at: int) -> bool:
        start = frame.word if frame.word >= 0 else at
        return self.text[:start].rstrip(" \t")[-1:] in ("<", ">")

    @staticmethod
    def _is_code(words: list[str]) -> bool:
        if "eval" in words[:2] or words[:1] == ["alias"] or words == ["trap"]:
            return True
        return bool(words) and bool(re.fullmatch(r"-[a-zA-Z]*c", words[-1])) and any(_base(each) in _SHELLS for each in words[:-1])

    def _refuse(self, at: int, message: str, fix: str) -> None:
        self.errors.append(TemplateError(message, at, self.spans[at] - at, fix))

    def _warn(self, at: int, code: str, message: str) -> None:
        self.warnings.append((code, message, at, self.spans[at] - at))

    def _dollar(self, at: int, frame: _Frame, *, quoted: bool, heredoc: bool = False) -> int:
        text = self.text
        if text.startswith("$((", at) and self._ends_twice(at + 3):
            return self._arithmetic(at + 3, frame)
        if text.startswith("$(", at):
            return self._commands(at + 2, _Frame(")", self._code_here(frame)))
        if text.startswith("${", at) and at + 1 not in self.spans:
            return self._parameter(at + 2, frame, quoted=quoted, heredoc=heredoc)
        if self.bash and text.startswith("$[", at):
            return self._arithmetic(at + 2, frame, "]")
        return at + 1

    def _code_here(self, frame: _Frame) -> bool:
        return frame.code or self._is_code(frame.words)

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
        while at < len(text):
            char = text[at]
            if at in self.spans:
                at = self._expression(at, frame, quoted=quoted, number=number)
            elif char == close:
                return at + 1
            elif char == "\\":
                at = self._escaped(at)
            elif char == "$" and singles and self.bash and text.startswith("$'", at):
                at = self._single(at + 2, ansi=True)
            elif char == "$":
                at = self._dollar(at, frame, quoted=quoted and not singles, heredoc=heredoc)
            elif char == "`":
                if frame.close == "`":
                    return at
                at = self._commands(at + 1, _Frame("`", self._code_here(frame)))
            elif char == "'" and singles:
                at = self._single(at + 1)
            elif char == '"' and not heredoc:
                at = self._double(at + 1, frame)
            else:
                at += 1
        return at

    def _parameter(self, at: int, frame: _Frame, *, quoted: bool, heredoc: bool) -> int:
        text = self.text
        if text[at : at + 1] in ("!", "#") and text[at + 1 : at + 2] not in ("}", ""):
            at += 1
        if at in self.spans:
            self._refuse(at, "a variable's name cannot be a value", "use a fixed name")
        name = _NAME.match(text, at)
        at = name.end() if name else at
        if text.startswith("[", at):
            at = self._until("]", at + 1, frame, quoted=True, number=self.bash)
        sign = text[at : at + 1]
        if sign == ":" and text[at + 1 : at + 2] not in ("-", "=", "+", "?"):
            return self._until("}", at + 1, frame, quoted=True, number=True)
        if sign in ("#", "%", "/", "^", ","):  # a pattern: quotes count in it wherever it stands, and take away its magic
            return self._until("}", at + 1, frame, quoted=False, singles=True)
        return self._until("}", at, frame, quoted=quoted, heredoc=heredoc, singles=not quoted)

    def _arithmetic(self, at: int, frame: _Frame, close: str = "))") -> int:
        depth = 0
        while at < len(self.text):
            char = self.text[at]
            if at in self.spans:
                at = self._expression(at, frame, quoted=True, number=True)
            elif not depth and self.text.startswith(close, at):
                return at + len(close)
            elif char == "\\":
                at = self._escaped(at)
            elif char == "$":
                at = self._dollar(at, frame, quoted=True)
            elif char == "`":
                at = self._commands(at + 1, _Frame("`", self._code_here(frame)))
            else:
                depth += {close[0]: -1, "(" if close == "))" else "[": 1}.get(char, 0)
                at += 1
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
                if frame.word < 0:
                    frame.word = at
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
            if frame.word < 0:
                frame.word = at
            at += 1
        self._end_word(at, frame)
        return at

    def _end_word(self, at: int, frame: _Frame) -> None:
        if frame.word < 0:
            return
        word, frame.word = self.text[frame.word : at], -1
        state = frame.cases[-1] if frame.cases else ""
        if state == "subject" and word == "in":
            frame.cases[-1] = "pattern"
            frame.words.clear()
        elif word == "esac" and (state == "pattern" or (state == "body" and not frame.words)):
            frame.cases.pop()
        elif not frame.words and word == "case":
            frame.cases.append("subject")
            frame.words.append(word)
        elif not frame.words and (word in _AGAIN or _ASSIGNMENT.match(word)):
            return
        else:
            if word == "[[" and not frame.words and self.bash:
                end = self.text.find("]]", at)
                frame.arithmetic_test = _COMPARES_NUMBERS.search(self.text, at, end if end >= 0 else len(self.text)) is not None
            elif word == "]]":
                frame.arithmetic_test = False
            frame.words.append(word)

    def _end_command(self, at: int, frame: _Frame) -> None:
        self._end_word(at, frame)
        frame.words.clear()

    # Each of these reads what begins with its character in a list of commands: the index behind it, `at` when it is an ordinary character,
    # or the complement of an index when the list ends there.

    def _on_space(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        return at + 1

    def _on_newline(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        if not (frame.cases and frame.cases[-1] == "subject") and not frame.arithmetic_test:
            frame.words.clear()
        at += 1
        pending, frame.pending = frame.pending, []
        for delimiter, quoted, tabs, feeds in pending:
            at = self._here_document(at, frame, delimiter, quoted, tabs, feeds)
        return at

    def _on_backslash(self, at: int, frame: _Frame) -> int:
        if frame.word < 0 and not self.text.startswith("\\\n", at):
            frame.word = at
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
        return self._commands(at + 1, _Frame("`", self._code_here(frame)))

    def _on_hash(self, at: int, frame: _Frame) -> int:
        return self._comment(at, frame) if frame.word < 0 else at

    def _on_open(self, at: int, frame: _Frame) -> int:
        if self.bash and self.text.startswith("((", at) and frame.word < 0 and frame.words in ([], ["for"]) and self._ends_twice(at + 2):
            return self._arithmetic(at + 2, frame)
        if frame.cases and frame.cases[-1] == "pattern" and frame.word < 0:
            return at + 1
        frame.depth += 1
        array = frame.word >= 0 and self.text[at - 1] == "="
        if array:
            self._end_word(at, frame)
        else:
            self._end_command(at, frame)
        return at + 1

    def _on_close(self, at: int, frame: _Frame) -> int:
        self._end_command(at, frame)
        if frame.cases and frame.cases[-1] == "pattern":
            frame.cases[-1] = "body"
        elif frame.depth:
            frame.depth -= 1
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
        self._end_command(at, frame)
        if self.text.startswith("||", at):
            return at + 2
        self.pipes.append(at)
        return at + (2 if self.text.startswith("|&", at) else 1)

    def _on_ampersand(self, at: int, frame: _Frame) -> int:
        if self.text[at - 1 : at] in ("<", ">") or self.text.startswith("&>", at):
            self._end_word(at, frame)
        else:
            self._end_command(at, frame)
        return at + 1

    def _on_less(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        if self.text.startswith("<<<", at):
            return at + 3
        if self.text.startswith("<<", at):
            return self._here(at + 2, frame)
        return self._on_greater(at, frame)

    def _on_greater(self, at: int, frame: _Frame) -> int:
        self._end_word(at, frame)
        if self.bash and self.text.startswith("(", at + 1):
            return self._commands(at + 2, _Frame(")", self._code_here(frame)))
        return at + 1

    def _begin(self, at: int, frame: _Frame) -> None:
        if frame.word < 0:
            frame.word = at

    # -- here-documents --

    def _here(self, at: int, frame: _Frame) -> int:
        """`<<` was read: its delimiter, for the next newline."""
        text = self.text
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
        feeds = bool(frame.words) and _base(frame.words[0]) in _SHELLS and "-c" not in frame.words
        frame.pending.append((delimiter, quoted, tabs, feeds))
        return at

    def _here_document(self, at: int, frame: _Frame, delimiter: str, quoted: bool, tabs: bool, feeds: bool) -> int:
        text = self.text
        end, joined = at, False
        while end < len(text):
            line_end = next((position for position in self._line_ends(end)), len(text))
            line = text[end:line_end]
            if not joined and (line.lstrip("\t") if tabs else line) == delimiter:
                break
            joined = not quoted and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            end = line_end + 1
        inner = _Frame("", feeds)
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
                at = self._commands(at + 1, _Frame("`", feeds))
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


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _single(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
