"""Quotes, expansions, comments and here-documents of a script: text in which some characters mean something, with the expressions in it as atoms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .shell_values import Frame, Values

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_COMPUTED = re.compile(r"\$\{?!?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*)")


class Expansions:
    """Of one script.  Each method answers the index behind what it read; `commands` reads a list of commands inside an expansion."""

    def __init__(
        self, text: str, bash: bool, values: Values, commands: Callable[[int, Frame], int]
    ) -> None:
        self.text, self.bash, self.values, self._commands = text, bash, values, commands
        self.spans = values.spans

    def dollar(self, at: int, frame: Frame, *, quoted: bool, heredoc: bool = False) -> int:
        """An expansion that begins with a dollar."""
        text = self.text
        if text.startswith("$((", at) and self.ends_twice(at + 3):
            return self.arithmetic(at + 3, frame)
        if text.startswith("$(", at):
            return self._commands(at + 2, Frame(")", number=text.startswith("$((", at)))
        if text.startswith("${", at) and at + 1 not in self.spans:
            return self._parameter(at + 2, frame, quoted=quoted, heredoc=heredoc)
        if text.startswith("$[", at):
            return self.arithmetic(at + 2, frame, "]")
        return at + 1

    def ends_twice(self, at: int) -> bool:
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
                at = self.escaped(at)
            else:
                yield at, self.text[at]
                at += 1

    def escaped(self, at: int) -> int:
        """Behind a backslash and what it takes with it; an expression it never takes."""
        return at + 1 if at + 1 in self.spans else at + 2

    # -- contexts --

    def single(self, at: int, ansi: bool = False) -> int:
        """Behind the end of single quotes; `ansi`: of `$'…'`."""
        while at < len(self.text):
            if at in self.spans:
                self.values.refuse(
                    at, "a value cannot stand inside single quotes", "use double quotes"
                )
                at = self.spans[at]
            elif self.text[at] == "'":
                return at + 1
            else:
                at += 2 if ansi and self.text[at] == "\\" and at + 1 not in self.spans else 1
        return at

    def double(self, at: int, frame: Frame) -> int:
        """Behind the end of double quotes."""
        return self._until('"', at, frame, quoted=True)

    def _until(
        self,
        close: str,
        at: int,
        frame: Frame,
        *,
        quoted: bool,
        number: bool = False,
        heredoc: bool = False,
        singles: bool = False,
    ) -> int:
        """Text in which only expansions mean something, up to `close`.  `singles`: single quotes quote here."""
        text, depth = self.text, 0
        outside, frame.number = frame.number, frame.number or number
        while at < len(text):
            char = text[at]
            if at in self.spans:
                at = self.values.place(at, frame, quoted=quoted)
            elif char == close:
                at += 1
                if not depth:
                    break
                depth -= 1
            elif char == "[" and close == "]":
                at, depth = at + 1, depth + 1
            elif char == "\\":
                at = self.escaped(at)
            elif char == "$" and singles and self.bash and text.startswith("$'", at):
                at = self.single(at + 2, ansi=True)
            elif char == "$":
                at = self.dollar(at, frame, quoted=quoted and not singles, heredoc=heredoc)
            elif char == "`":
                if frame.close == "`":
                    break
                at = self._commands(at + 1, Frame("`"))
            elif char == "'" and singles:
                at = self.single(at + 1)
            elif char == '"' and not heredoc:
                at = self.double(at + 1, frame)
            else:
                at += 1
        frame.number = outside
        return at

    def subscript(self, at: int, frame: Frame) -> int:
        """Behind the bracket that ends a subscript of what is set."""
        return self._until("]", at, frame, quoted=True, number=True, singles=True)

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
        if sign in (
            "#",
            "%",
            "/",
            "^",
            ",",
        ):  # a pattern: quotes count in it wherever it stands, and take away its magic
            return self._until("}", at + 1, frame, quoted=False, singles=True)
        return self._until("}", at, frame, quoted=quoted, heredoc=heredoc, singles=not quoted)

    def arithmetic(self, at: int, frame: Frame, close: str = "))") -> int:
        """A sum, up to `close`."""
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
                at = self.escaped(at)
            elif char in "$`":
                start = at
                at = (
                    self.dollar(at, frame, quoted=True)
                    if char == "$"
                    else self._commands(at + 1, Frame("`"))
                )
                self.values.program(start, at, "$(( ))")
            elif name:
                at = name.end()
            else:
                depth += {close[0]: -1, "(" if close == "))" else "[": 1}.get(char, 0)
                at += 1
        frame.number = outside
        return at

    def comment(self, at: int, frame: Frame) -> int:
        """Behind a comment, which ends with its line or with the backquotes that it is in."""
        while (
            at < len(self.text)
            and self.text[at] != "\n"
            and not (frame.close == "`" and self.text[at] == "`")
        ):
            if at in self.spans:
                self.values.comment(at)
                at = self.spans[at]
            else:
                at += 1
        return at

    # -- here-documents --

    def here(self, at: int, frame: Frame) -> int:
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

    def here_document(
        self, at: int, frame: Frame, delimiter: str, quoted: bool, tabs: bool, named: int
    ) -> int:
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
                    self.values.refuse(
                        at,
                        "a value cannot stand in a here-document with a quoted delimiter",
                        f"write `<<{delimiter}` without quotes",
                    )
                    at = self.spans[at]
                else:
                    at = self.values.place(at, inner, quoted=True)
            elif quoted:
                at += 1
            elif char == "\\":
                at = self.escaped(at)
            elif char == "$":
                at = self.dollar(at, inner, quoted=True, heredoc=True)
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
