"""Read a script as a shell does: tokens, quotes, expansions, here-documents and pipelines, with the expressions in it as atoms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from .interpreters import INNER, Word, assignment
from .shell_values import Compound, Frame, Reading, Values
from .template import TemplateError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_COMPUTED = re.compile(r"\$\{?!?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*)")
_FILE_NUMBER = re.compile(r"[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\}")
_AGAIN = frozenset({"then", "do", "else", "elif", "!", "time", "coproc"})  # a command follows
_OPENS = frozenset({"if", "while", "until", "for", "select", "{"})
_CLOSES = frozenset({"fi", "done", "}"})


@lru_cache(maxsize=1 << 14)
def read(text: str, bash: bool) -> Reading:
    """Where each expression of a script stands, and what reads it.  Raises TemplateError: one is none, or the script is nested too deeply."""
    return _Reader(text, bash).read()


class _Reader:
    """A shell's own order of reading, with expressions as atoms."""

    def __init__(self, text: str, bash: bool) -> None:
        self.text = text
        self.bash = bash
        self.values = Values(text)
        self.spans = self.values.spans
        self.pipes: list[int] = []

    def read(self) -> Reading:
        try:
            self._commands(0, Frame(""))
        except RecursionError:
            raise TemplateError("this script is nested too deeply") from None
        return self.values.reading(tuple(self.pipes))

    # -- what every context shares --

    def _dollar(self, at: int, frame: Frame, *, quoted: bool, heredoc: bool = False) -> int:
        text = self.text
        if text.startswith("$((", at) and self._ends_twice(at + 3):
            return self._arithmetic(at + 3, frame)
        if text.startswith("$(", at):
            return self._commands(at + 2, Frame(")", number=text.startswith("$((", at)))
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
                self.values.refuse(at, "a value cannot stand inside single quotes", "use double quotes")
                at = self.spans[at]
            elif self.text[at] == "'":
                return at + 1
            else:
                at += 2 if ansi and self.text[at] == "\\" and at + 1 not in self.spans else 1
        return at

    def _double(self, at: int, frame: Frame) -> int:
        return self._until('"', at, frame, quoted=True)

    def _until(self, close: str, at: int, frame: Frame, *, quoted: bool, number: bool = False, heredoc: bool = False, singles: bool = False) -> int:
        """Text in which only expansions mean something, up to `close`.  `singles`: single quotes quote here."""
        text = self.text
        outside, frame.number = frame.number, frame.number or number
        while at < len(text):
            char = text[at]
            if at in self.spans:
                at = self.values.place(at, frame, quoted=quoted)
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
                at = self._commands(at + 1, Frame("`"))
            elif char == "'" and singles:
                at = self._single(at + 1)
            elif char == '"' and not heredoc:
                at = self._double(at + 1, frame)
            else:
                at += 1
        frame.number = outside
        return at

    def _parameter(self, at: int, frame: Frame, *, quoted: bool, heredoc: bool) -> int:
        text = self.text
        if text[at : at + 1] in ("!", "#") and text[at + 1 : at + 2] not in ("}", ""):
            at += 1
        if at in self.spans:
            self.values.refuse(at, "a variable's name cannot be a value", "use a fixed name")
        name = _NAME.match(text, at)
        at = name.end() if name else at
        if name and (text[name.start() - 1] == "!" or text.startswith("@P}", at)):
            self.values.computed.add(name[0])
        if text.startswith("[", at):
            start, at = at, self._until("]", at + 1, frame, quoted=True, number=True)
            self.values.computes(text[start:at], name[0] if name else "")
            self.values.program(start, at, "a subscript")
        sign = text[at : at + 1]
        if sign == ":" and text[at + 1 : at + 2] not in ("-", "=", "+", "?"):
            start, at = at, self._until("}", at + 1, frame, quoted=True, number=True)
            self.values.computes(text[start:at])
            self.values.program(start, at, "${…:…}")
            return at
        if sign in ("#", "%", "/", "^", ","):  # a pattern: quotes count in it wherever it stands, and take away its magic
            return self._until("}", at + 1, frame, quoted=False, singles=True)
        return self._until("}", at, frame, quoted=quoted, heredoc=heredoc, singles=not quoted)

    def _arithmetic(self, at: int, frame: Frame, close: str = "))") -> int:
        depth = 0
        outside, frame.number = frame.number, True
        while at < len(self.text):
            char = self.text[at]
            name = _COMPUTED.match(self.text, at)
            if name:
                self.values.computed.add(name[1] or name[2])
            if at in self.spans:
                at = self.values.place(at, frame, quoted=True)
            elif not depth and self.text.startswith(close, at):
                at += len(close)
                break
            elif char == "\\":
                at = self._escaped(at)
            elif char in "$`":
                start = at
                at = self._dollar(at, frame, quoted=True) if char == "$" else self._commands(at + 1, Frame("`"))
                self.values.program(start, at, "$(( ))")
            elif name:
                at = name.end()
            else:
                depth += {close[0]: -1, "(" if close == "))" else "[": 1}.get(char, 0)
                at += 1
        frame.number = outside
        return at

    def _comment(self, at: int, frame: Frame) -> int:
        while at < len(self.text) and self.text[at] != "\n" and not (frame.close == "`" and self.text[at] == "`"):
            if at in self.spans:
                self.values.comment(at)
                at = self.spans[at]
            else:
                at += 1
        return at

    def _commands(self, at: int, frame: Frame) -> int:
        text = self.text
        while at < len(text):
            char = text[at]
            if at in self.spans:
                self._begin(at, frame)
                at = self.values.place(at, frame, quoted=False)
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

    def _end_word(self, at: int, frame: Frame) -> None:
        if frame.word < 0:
            return
        raw = self.text[frame.word : at]
        word = Word(frame.word, at, self.values.plain(frame.word, at, frame), frame.redirect)
        frame.word, frame.redirect = -1, ""
        state = frame.cases[-1] if frame.cases else ""
        if word.redirect:
            frame.words.append(word)
        elif frame.array:
            if raw.startswith("[") and INNER in word.text:
                self.values.program(word.start, word.end, "a subscript")
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
            self.values.assign(word, frame)
            if assignment(word) is None:
                frame.words.append(word)

    def _next_word(self, raw: str, word: Word, frame: Frame) -> None:
        head = frame.words[0].text
        if (head in ("for", "select") and raw in ("do", "{")) or head == "function":
            self.values.judge(word.start, frame)  # a command follows
            return
        frame.words.append(word)
        if head == "[[" and raw == "]]":
            self.values.judge(word.end, frame)
        elif raw != word.text or "=" in raw:
            self.values.assign(word, frame)

    def _open(self, at: int, frame: Frame) -> None:
        frame.compounds.append(Compound(frame.begin if frame.begin >= 0 else at, at))
        frame.begin = -1

    def _close(self, at: int, frame: Frame) -> None:
        """A compound command has ended; only redirections can follow."""
        frame.words.clear()
        if frame.compounds:
            frame.closed = (frame.compounds.pop(), at)
            frame.begin = frame.closed[0].begin

    def _end_command(self, at: int, frame: Frame, *, piped: bool = False) -> None:
        self._end_word(at, frame)
        if frame.testing and at < len(self.text):
            return
        self.values.judge(at, frame)
        frame.piped = piped
        if not piped:
            frame.begin = -1

    # Each of these reads what begins with its character in a list of commands: the index behind it, `at` when it is an ordinary character,
    # or the complement of an index when the list ends there.

    def _on_space(self, at: int, frame: Frame) -> int:
        self._end_word(at, frame)
        return at + 1

    def _on_newline(self, at: int, frame: Frame) -> int:
        self._end_word(at, frame)
        if not (frame.cases and frame.cases[-1] == "subject"):
            self._end_command(at, frame, piped=frame.piped and frame.bare)
        at += 1
        pending, frame.pending = frame.pending, []
        for delimiter, quoted, tabs, named in pending:
            at = self._here_document(at, frame, delimiter, quoted, tabs, named)
        return at

    def _on_backslash(self, at: int, frame: Frame) -> int:
        if not self.text.startswith("\\\n", at):
            self._begin(at, frame)
        return self._escaped(at)

    def _on_single(self, at: int, frame: Frame) -> int:
        self._begin(at, frame)
        return self._single(at + 1)

    def _on_double(self, at: int, frame: Frame) -> int:
        self._begin(at, frame)
        return self._double(at + 1, frame)

    def _on_dollar(self, at: int, frame: Frame) -> int:
        self._begin(at, frame)
        if self.text.startswith("$'", at):
            return self._single(at + 2, ansi=self.bash)
        return self._dollar(at, frame, quoted=False)

    def _on_backtick(self, at: int, frame: Frame) -> int:
        if frame.close == "`":
            self._end_command(at, frame)
            return ~(at + 1)
        self._begin(at, frame)
        return self._commands(at + 1, Frame("`"))

    def _on_hash(self, at: int, frame: Frame) -> int:
        return self._comment(at, frame) if frame.word < 0 else at

    def _on_open(self, at: int, frame: Frame) -> int:
        if frame.word >= 0 and self.text[at - 1] == "=":
            return self._commands(at + 1, Frame(")", array=True, places=frame.places))
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
            return self._commands(at + 1, Frame(")", number=True))
        self._end_word(at, frame)
        self.values.judge(at, frame)
        frame.depth += 1
        self._open(at, frame)
        return at + 1

    def _on_close(self, at: int, frame: Frame) -> int:
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

    def _on_semicolon(self, at: int, frame: Frame) -> int:
        self._end_command(at, frame)
        if self.text.startswith((";;", ";&"), at) and frame.cases:
            frame.cases[-1] = "pattern"
            return at + (3 if self.text.startswith(";;&", at) else 2)
        return at + 1

    def _on_pipe(self, at: int, frame: Frame) -> int:
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

    def _on_ampersand(self, at: int, frame: Frame) -> int:
        if self.text[at - 1 : at] in ("<", ">"):
            frame.redirect += "&"
        elif self.text.startswith("&>", at):
            self._end_word(at, frame)
        else:
            self._end_command(at, frame)
        return at + 1

    def _on_less(self, at: int, frame: Frame) -> int:
        if self.text.startswith("<<<", at):
            return self._redirect(at, frame, "<<<")
        if self.text.startswith("<<", at):
            self._redirect(at, frame, "")
            return self._here(at + 2, frame)
        return self._on_greater(at, frame)

    def _on_greater(self, at: int, frame: Frame) -> int:
        if self.text.startswith("(", at + 1):
            self._begin(at, frame)
            return self._commands(at + 2, Frame(")", feeder=frame.begin if self.text[at] == ">" else -1))
        return self._redirect(at, frame, self.text[at])

    def _redirect(self, at: int, frame: Frame, operator: str) -> int:
        """An operator in front of a word; what is attached to it in front is the number of a file."""
        if frame.word >= 0 and _FILE_NUMBER.fullmatch(self.text, frame.word, at):
            frame.word = -1
        self._end_word(at, frame)
        if frame.begin < 0:
            frame.begin = at
        frame.redirect = "" if frame.testing else operator
        return at + max(1, len(operator))

    def _begin(self, at: int, frame: Frame) -> None:
        if frame.word < 0:
            frame.word = at
        frame.piped = False
        if frame.begin < 0:
            frame.begin = at

    # -- here-documents --

    def _here(self, at: int, frame: Frame) -> int:
        """`<<` was read: its delimiter, for the next newline."""
        text, named = self.text, at - 1
        tabs = text.startswith("-", at)
        at += tabs
        while text[at : at + 1] in (" ", "\t"):
            at += 1
        delimiter, quoted = "", False
        while at < len(text) and text[at] not in " \t\n;&|()<>":
            if at in self.spans:
                self.values.refuse(at, "a value cannot end a here-document", "use a fixed word")
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

    def _here_document(self, at: int, frame: Frame, delimiter: str, quoted: bool, tabs: bool, named: int) -> int:
        text = self.text
        end, joined = at, False
        while end < len(text):
            line_end = next((position for position in self._line_ends(end)), len(text))
            line = text[end:line_end]
            if not joined and (line.lstrip("\t") if tabs else line) == delimiter:
                break
            joined = not quoted and (len(line) - len(line.rstrip("\\"))) % 2 == 1
            end = line_end + 1
        inner = Frame("")
        self.values.body(at, end, named)
        while at < min(end, len(text)):
            char = text[at]
            if at in self.spans:
                if quoted:
                    self.values.refuse(at, "a value cannot stand in a here-document with a quoted delimiter", f"write `<<{delimiter}` without quotes")
                    at = self.spans[at]
                else:
                    at = self.values.place(at, inner, quoted=True)
            elif quoted:
                at += 1
            elif char == "\\":
                at = self._escaped(at)
            elif char == "$":
                at = self._dollar(at, inner, quoted=True, heredoc=True)
            elif char == "`":
                at = self._commands(at + 1, Frame("`"))
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


_IN_COMMANDS: Mapping[str, Callable[[_Reader, int, Frame], int]] = {
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
