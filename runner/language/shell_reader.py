"""Parse a script like a shell: words, commands, compounds, pipelines.

Template expressions are read as atoms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from .interpreters import CommandWord, parse_assignment
from .shell_expansions import Expansions
from .shell_values import Compound, Frame, ParsedScript, Values
from .template import TemplateError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FILE_NUMBER = re.compile(r"[0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\}")
_BEFORE_COMMAND = frozenset({"then", "do", "else", "elif", "!", "time", "coproc"})
_OPENS = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_HAS_SUBJECT = frozenset({"for", "select", "case"})
_CLOSES = frozenset({"fi", "done", "}"})


@lru_cache(maxsize=1 << 14)
def read(text: str, bash: bool) -> ParsedScript:
    """Parse a shell script: the position of each template expression, and its reading command.

    Raises TemplateError for an invalid expression, or a script with too many levels.
    """
    return _CommandParser(text, bash).read()


class _CommandParser:
    """Parser of command lists in a shell script."""

    def __init__(self, text: str, bash: bool) -> None:
        self.text = text
        self.bash = bash
        self.values = Values(text)
        self.spans = self.values.spans
        self.expansions = Expansions(text, bash, self.values, self._commands)
        self.pipes: list[int] = []

    def read(self) -> ParsedScript:
        try:
            self._commands(0, Frame(""))
        except RecursionError:
            raise TemplateError("this script is nested too deeply") from None
        return self.values.finish(tuple(self.pipes))

    def _commands(self, at: int, frame: Frame) -> int:
        """Parse a list of commands from `at` on, and return the index after the list."""
        text = self.text
        while at < len(text):
            char = text[at]
            if at in self.spans:
                frame.begin_word(at)
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
            frame.begin_word(at)
            at += 1
        self._end_command(at, frame)
        return at

    # -- words --

    def _end_word(self, at: int, frame: Frame) -> None:
        """Process the current word, which ends at `at`."""
        if frame.word < 0:
            return
        raw = self.text[frame.word : at]
        word = CommandWord(frame.word, at, self.values.plain(frame.word, at, frame), frame.redirect)
        frame.word, frame.redirect = -1, ""
        if word.redirect:
            frame.words.append(word)
        elif frame.array:
            return
        elif self._ends_case_part(raw, frame):
            self._end_case_part(raw, at, frame)
        elif frame.is_empty:
            self._first_word(raw, word, frame)
        else:
            self._next_word(raw, word, frame)

    def _ends_case_part(self, raw: str, frame: Frame) -> bool:
        """Return True if a word is the `in` or `esac` keyword of a `case` command."""
        if raw == "in":
            return frame.case_part == "subject"
        if raw != "esac":
            return False
        # Behind a command's name, `esac` is an argument.
        if frame.case_part == "body":
            return frame.is_empty
        return frame.case_part == "pattern"

    def _end_case_part(self, raw: str, at: int, frame: Frame) -> None:
        if raw == "in":
            frame.cases[-1] = "pattern"
            frame.words.clear()
        else:
            frame.cases.pop()
            self._close(at, frame)

    def _first_word(self, raw: str, word: CommandWord, frame: Frame) -> None:
        """Process a command's first word, such as a keyword, an assignment or a command name."""
        if raw in _OPENS:
            self._open(word.start, frame)
            if raw == "case":
                frame.cases.append("subject")
            if raw in _HAS_SUBJECT:
                frame.words.append(word)
        elif raw in _CLOSES:
            self._close(word.end, frame)
        elif raw not in _BEFORE_COMMAND and not raw.startswith("-"):  # `time -p`
            self.values.assign(word, frame)
            if parse_assignment(word) is None:
                frame.words.append(word)

    def _next_word(self, raw: str, word: CommandWord, frame: Frame) -> None:
        head = frame.words[0].text
        begins_body = head in ("for", "select") and raw in ("do", "{")
        if begins_body or head == "function":
            self.values.judge(word.start, frame)
            return
        frame.words.append(word)
        if head == "[[" and raw == "]]":
            self.values.judge(word.end, frame)
        elif raw != word.text or "=" in raw:
            self.values.assign(word, frame)

    # -- commands --

    def _open(self, at: int, frame: Frame) -> None:
        """Start a compound command, such as a loop or `( )`."""
        begin = frame.begin if frame.begin >= 0 else at
        frame.compounds.append(Compound(begin, at))
        frame.begin = -1

    def _close(self, at: int, frame: Frame) -> None:
        """End a compound command, which only redirections can follow."""
        frame.words.clear()
        if frame.compounds:
            frame.closed = (frame.compounds.pop(), at)
            frame.begin = frame.closed[0].begin

    def _end_command(self, at: int, frame: Frame, *, piped: bool = False) -> None:
        """End a simple command. If `piped`, the pipeline continues."""
        self._end_word(at, frame)
        if frame.is_test and at < len(self.text):
            return
        self.values.judge(at, frame)
        frame.piped = piped
        if not piped:
            frame.begin = -1

    # -- characters --
    #
    # Each method reads a construct that starts with its character.  It returns the index after the
    # construct, `at` for an ordinary character, or the complement of an index if the list ends.

    def _on_space(self, at: int, frame: Frame) -> int:
        self._end_word(at, frame)
        return at + 1

    def _on_newline(self, at: int, frame: Frame) -> int:
        self._end_word(at, frame)
        # `in` may be on the line after the subject.
        if frame.case_part != "subject":
            self._end_command(at, frame, piped=frame.piped and frame.is_empty)
        at += 1
        pending, frame.pending = frame.pending, []
        for document in pending:
            at = self.expansions.here_document(at, document)
        return at

    def _on_backslash(self, at: int, frame: Frame) -> int:
        if not self.text.startswith("\\\n", at):
            frame.begin_word(at)
        return self.expansions.skip_escaped(at)

    def _on_single(self, at: int, frame: Frame) -> int:
        frame.begin_word(at)
        return self.expansions.single(at + 1)

    def _on_double(self, at: int, frame: Frame) -> int:
        frame.begin_word(at)
        return self.expansions.double(at + 1, frame)

    def _on_dollar(self, at: int, frame: Frame) -> int:
        frame.begin_word(at)
        if self.text.startswith("$'", at):
            return self.expansions.single(at + 2, ansi=self.bash)
        return self.expansions.dollar(at, frame, quoted=False)

    def _on_backtick(self, at: int, frame: Frame) -> int:
        if frame.close == "`":
            self._end_command(at, frame)
            return ~(at + 1)
        frame.begin_word(at)
        return self._commands(at + 1, Frame("`"))

    def _on_hash(self, at: int, frame: Frame) -> int:
        return self.expansions.comment(at, frame) if frame.word < 0 else at

    def _on_open(self, at: int, frame: Frame) -> int:
        if frame.word >= 0 and self.text[at - 1] == "=":
            name = _NAME.match(self.text, frame.word, at)
            array = name[0] if name else "="
            elements = Frame(")", array=array, places=frame.places)
            return self._commands(at + 1, elements)
        if frame.is_test:
            self._end_word(at, frame)
            frame.depth += 1
            return at + 1
        if frame.case_part == "pattern" and frame.word < 0:
            return at + 1
        if self.text.startswith("((", at) and not frame.array:
            self._end_word(at, frame)  # `for((`
            if self.expansions.ends_twice(at + 2):
                return self.expansions.arithmetic(at + 2, frame)
            self._end_command(at, frame, piped=True)
            return self._commands(at + 1, Frame(")", number=True))
        self._end_word(at, frame)
        self.values.judge(at, frame)
        frame.depth += 1
        self._open(at, frame)
        return at + 1

    def _on_bracket(self, at: int, frame: Frame) -> int:
        """Parse an array subscript in an assignment, which a shell evaluates as arithmetic."""
        if frame.case_part == "pattern":
            return at
        name = self._array_before(at, frame)
        if not name:
            return at
        frame.begin_word(at)
        end = self.expansions.subscript(at + 1, frame)
        self.values.computes(self.text[at:end], name)
        self.values.program(at, end, "a subscript")
        return end

    def _array_before(self, at: int, frame: Frame) -> str:
        """Return the array variable before the bracket at `at`, or ""."""
        if frame.array:
            return frame.array if frame.word < 0 else ""
        if frame.word < 0 or not frame.is_empty:
            return ""
        name = self.text[frame.word : at]
        return name if _NAME.fullmatch(name) else ""

    def _on_close(self, at: int, frame: Frame) -> int:
        self._end_command(at, frame)
        if frame.case_part == "pattern":
            frame.cases[-1] = "body"
        elif frame.depth:
            frame.depth -= 1
            if not frame.is_test:
                self._close(at + 1, frame)
        elif frame.close == ")":
            return ~(at + 1)
        return at + 1

    def _on_semicolon(self, at: int, frame: Frame) -> int:
        self._end_command(at, frame)
        if self.text.startswith((";;", ";&"), at) and frame.cases:
            frame.cases[-1] = "pattern"
            length = 3 if self.text.startswith(";;&", at) else 2
            return at + length
        return at + 1

    def _on_pipe(self, at: int, frame: Frame) -> int:
        if frame.case_part == "pattern":
            self._end_word(at, frame)
            return at + 1
        if self.text[at - 1 : at] == ">":
            return at + 1
        piped = not self.text.startswith("||", at)
        self._end_command(at, frame, piped=piped)
        if not piped:
            return at + 2
        if frame.is_test:
            return at + 1
        self.pipes.append(at)
        length = 2 if self.text.startswith("|&", at) else 1
        return at + length

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
            return self.expansions.here(at + 2, frame)
        return self._on_greater(at, frame)

    def _on_greater(self, at: int, frame: Frame) -> int:
        if self.text.startswith("(", at + 1):
            frame.begin_word(at)
            feeder = frame.begin if self.text[at] == ">" else -1
            return self._commands(at + 2, Frame(")", feeder=feeder))
        return self._redirect(at, frame, self.text[at])

    def _redirect(self, at: int, frame: Frame, operator: str) -> int:
        """Parse a redirection. A number directly before the operator is a file descriptor."""
        if frame.word >= 0 and _FILE_NUMBER.fullmatch(self.text, frame.word, at):
            frame.word = -1
        self._end_word(at, frame)
        if frame.begin < 0:
            frame.begin = at
        frame.redirect = "" if frame.is_test else operator
        return at + max(1, len(operator))


_IN_COMMANDS: Mapping[str, Callable[[_CommandParser, int, Frame], int]] = {
    " ": _CommandParser._on_space,
    "\t": _CommandParser._on_space,
    "\n": _CommandParser._on_newline,
    "\\": _CommandParser._on_backslash,
    "'": _CommandParser._on_single,
    '"': _CommandParser._on_double,
    "$": _CommandParser._on_dollar,
    "`": _CommandParser._on_backtick,
    "#": _CommandParser._on_hash,
    "[": _CommandParser._on_bracket,
    "(": _CommandParser._on_open,
    ")": _CommandParser._on_close,
    ";": _CommandParser._on_semicolon,
    "|": _CommandParser._on_pipe,
    "&": _CommandParser._on_ampersand,
    "<": _CommandParser._on_less,
    ">": _CommandParser._on_greater,
}
