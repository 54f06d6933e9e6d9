"""Read the quotes, expansions, comments and here-documents of a shell script.

Template expressions are read as atoms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .shell_values import Frame, HereDocument, Values

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-]")
_PATTERN_SIGNS = ("#", "%", "/", "^", ",")
_COMPUTED = re.compile(r"\$\{?!?([A-Za-z_][A-Za-z0-9_]*)|([A-Za-z_][A-Za-z0-9_]*)")


class _Context(NamedTuple):
    """Characters with a special meaning in a part of a script."""

    quoted: bool  # values need no quotes of their own
    heredoc: bool = False  # double quotes mean nothing
    singles: bool = False  # single quotes quote


_IN_HEREDOC = _Context(quoted=True, heredoc=True)


class Expansions:
    """Parser of one script's expansions. Each method returns the index after its text.

    `commands` reads a list of commands inside an expansion.
    """

    def __init__(
        self, text: str, bash: bool, values: Values, commands: Callable[[int, Frame], int]
    ) -> None:
        self.text, self.bash, self.values, self._commands = text, bash, values, commands
        self.spans = values.spans

    def dollar(self, at: int, frame: Frame, *, quoted: bool, heredoc: bool = False) -> int:
        """Parse the expansion that begins with the dollar sign at `at`, and return the index after
        the expansion.
        """
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
        """Return True if the `((` before `at` ends with `))`, and is not a nested subshell."""
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
        """Yield the characters from `at` on, without expressions and escaped characters."""
        while at < len(self.text):
            if at in self.spans:
                at = self.spans[at]
            elif self.text[at] == "\\":
                at = self.skip_escaped(at)
            else:
                yield at, self.text[at]
                at += 1

    def skip_escaped(self, at: int) -> int:
        """Return the index after an escaped character; an expression cannot be escaped."""
        return at + 1 if at + 1 in self.spans else at + 2

    # -- contexts --

    def single(self, at: int, ansi: bool = False) -> int:
        """Parse single quotes to their end. With `ansi` (`$'…'`), a backslash escapes."""
        while at < len(self.text):
            if at in self.spans:
                message = "a template cannot be inside single quotes"
                self.values.refuse(at, message, "use double quotes")
                at = self.spans[at]
            elif self.text[at] == "'":
                return at + 1
            elif ansi and self.text[at] == "\\":
                at = self.skip_escaped(at)
            else:
                at += 1
        return at

    def double(self, at: int, frame: Frame) -> int:
        """Parse double quotes to their end."""
        return self._until('"', at, frame, _Context(quoted=True))

    def _until(
        self, close: str, at: int, frame: Frame, context: _Context, *, number: bool = False
    ) -> int:
        """Parse text up to `close`, in which only expansions are special.

        `number`: a shell evaluates the text as arithmetic.
        """
        depth = 0
        outside, frame.number = frame.number, frame.number or number
        while at < len(self.text):
            char = "" if at in self.spans else self.text[at]
            if char == close:
                at += 1
                if not depth:
                    break
                depth -= 1
            elif char == "[" and close == "]":
                at += 1
                depth += 1
            elif char == "`" and frame.close == "`":
                break
            else:
                at = self._step(at, frame, context)
        frame.number = outside
        return at

    def _step(self, at: int, frame: Frame, context: _Context) -> int:
        """Parse one character, expression or expansion of a text."""
        if at in self.spans:
            return self.values.place(at, frame, quoted=context.quoted)
        char = self.text[at]
        if char == "\\":
            return self.skip_escaped(at)
        if char == "$":
            return self._dollar_in_text(at, frame, context)
        if char == "`":
            return self._commands(at + 1, Frame("`"))
        if char == "'" and context.singles:
            return self.single(at + 1)
        if char == '"' and not context.heredoc:
            return self.double(at + 1, frame)
        return at + 1

    def _dollar_in_text(self, at: int, frame: Frame, context: _Context) -> int:
        has_ansi_quotes = self.bash and context.singles
        if has_ansi_quotes and self.text.startswith("$'", at):
            return self.single(at + 2, ansi=True)
        quoted = context.quoted and not context.singles
        return self.dollar(at, frame, quoted=quoted, heredoc=context.heredoc)

    # -- parameters and arithmetic --

    def subscript(self, at: int, frame: Frame) -> int:
        """Parse an array subscript in an assignment, to its closing bracket."""
        return self._until("]", at, frame, _Context(quoted=True, singles=True), number=True)

    def _parameter(self, at: int, frame: Frame, *, quoted: bool, heredoc: bool) -> int:
        """Parse a parameter expansion `${…}`, with its name or operator at `at`."""
        text = self.text
        if text[at : at + 1] in ("!", "#") and text[at + 1 : at + 2] not in ("}", ""):
            at += 1
        if at in self.spans:
            self.values.refuse(at, "a variable name cannot be a template", "use a fixed name")
        name = _NAME.match(text, at)
        variable = ""
        if name:
            variable, at = name[0], name.end()
            # `${!x}` reads the value of x as a name, `${x@P}` expands it like a prompt.
            if text[name.start() - 1] == "!" or text.startswith("@P}", at):
                self.values.computed.add(variable)
        if text.startswith("[", at):
            start, at = at, self._until("]", at + 1, frame, _Context(quoted=True), number=True)
            self.values.computes(text[start:at], variable)
            self.values.program(start, at, "a subscript")
        sign = text[at : at + 1]
        if sign == ":" and text[at + 1 : at + 2] not in ("-", "=", "+", "?"):
            start, at = at, self._until("}", at + 1, frame, _Context(quoted=True), number=True)
            self.values.computes(text[start:at])
            self.values.program(start, at, "${…:…}")
            return at
        if sign in _PATTERN_SIGNS:
            # Quotes are special in every pattern, and make its characters literal.
            return self._until("}", at + 1, frame, _Context(quoted=False, singles=True))
        return self._until("}", at, frame, _Context(quoted, heredoc, singles=not quoted))

    def arithmetic(self, at: int, frame: Frame, close: str = "))") -> int:
        """Parse an arithmetic expression, up to `close`."""
        opening = "(" if close == "))" else "["
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
                at = self.skip_escaped(at)
            elif char in "$`":
                start, at = at, self._expansion_in_arithmetic(at, frame)
                self.values.program(start, at, "$(( ))")
            elif name:
                at = name.end()
            else:
                if char == opening:
                    depth += 1
                elif char == close[0]:
                    depth -= 1
                at += 1
        frame.number = outside
        return at

    def _expansion_in_arithmetic(self, at: int, frame: Frame) -> int:
        if self.text[at] == "$":
            return self.dollar(at, frame, quoted=True)
        return self._commands(at + 1, Frame("`"))

    def comment(self, at: int, frame: Frame) -> int:
        """Parse a comment, to the end of its line or of the enclosing backquotes."""
        ends = ("\n", "`") if frame.close == "`" else ("\n",)
        while at < len(self.text) and self.text[at] not in ends:
            if at in self.spans:
                self.values.comment(at)
                at = self.spans[at]
            else:
                at += 1
        return at

    # -- here-documents --

    def here(self, at: int, frame: Frame) -> int:
        """Parse a here-document's delimiter after `<<`. The body starts after the next newline."""
        text, named = self.text, at - 1
        strips_tabs = text.startswith("-", at)
        if strips_tabs:
            at += 1
        while text[at : at + 1] in (" ", "\t"):
            at += 1
        delimiter, quoted = "", False
        while at < len(text) and text[at] not in " \t\n;&|()<>":
            if at in self.spans:
                self.values.refuse(
                    at, "the end word of a here-document cannot be a template", "use a fixed word"
                )
                at = self.spans[at]
            elif text[at] in "'\"":
                close = text.find(text[at], at + 1)
                close = len(text) if close < 0 else close
                delimiter += text[at + 1 : close]
                quoted, at = True, close + 1
            elif text[at] == "\\":
                delimiter += text[at + 1 : at + 2]
                quoted, at = True, at + 2
            else:
                delimiter += text[at]
                at += 1
        frame.pending.append(HereDocument(delimiter, quoted, strips_tabs, named))
        return at

    def here_document(self, at: int, document: HereDocument) -> int:
        """Parse a here-document's body at `at` and its delimiter line."""
        text = self.text
        end = self._end_of_body(at, document)
        self.values.body(at, end, document.at)
        inner = Frame("")
        while at < min(end, len(text)):
            if not document.is_quoted:
                at = self._step(at, inner, _IN_HEREDOC)
            elif at in self.spans:
                message = "a template cannot be inside a here-document with a quoted delimiter"
                fix = f"write `<<{document.delimiter}` without quotes"
                self.values.refuse(at, message, fix)
                at = self.spans[at]
            else:
                at += 1
        line_end = text.find("\n", end)
        return len(text) if line_end < 0 else line_end + 1

    def _end_of_body(self, at: int, document: HereDocument) -> int:
        """Return the index of a here-document's delimiter line, or the script's end or beyond."""
        is_joined = False  # whether the previous line ends with a backslash
        while at < len(self.text):
            line_end = self._end_of_line(at)
            line = self.text[at:line_end]
            bare = line.lstrip("\t") if document.strips_tabs else line
            if bare == document.delimiter and not is_joined:
                break
            backslashes = len(line) - len(line.rstrip("\\"))
            is_joined = not document.is_quoted and backslashes % 2 == 1
            at = line_end + 1
        return at

    def _end_of_line(self, at: int) -> int:
        """Return the index of the next newline outside an expression, or the script's end."""
        while at < len(self.text):
            if at in self.spans:
                at = self.spans[at]
            elif self.text[at] == "\n":
                return at
            else:
                at += 1
        return len(self.text)
