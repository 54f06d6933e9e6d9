"""Check the arguments in a command against the options of its script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..errors import did_you_mean
from .bad_values import join_or
from .script_options import ScriptOption, ScriptOptions
from .values import Tree, Where

_CHOICE = re.compile(
    r"\{\{\s*('[^']*'|none)\s+if\s(?:(?!\}\}).)+\selse\s+('[^']*'|none)\s*\}\}", re.DOTALL
)
_NEGATIVE = re.compile(r"-[\d.]")
_SHELL_ENDS = frozenset(";|&<>()")
_SHELL_SPECIAL = re.compile(r"[$`*?\[~{]")
_SHOWN = 12  # options that a fix names
_CHANGES_DIRECTORY = re.compile(
    r"(?:^|[\s;&|(])(?:cd|pushd)\s"
)  # the folder in which the files are
_HOLE = "\0"  # stands for an expression in a script


class GivenWord(NamedTuple):
    """One word of a script's arguments.

    A template that may expand to any number of words has `free`; `text` is then the template.
    """

    text: str
    where: Where
    free: bool = False


class WordFault(NamedTuple):
    """An argument that the script would reject, with its position and a suggested fix."""

    message: str
    where: Where
    fix: str = ""
    word: str = ""  # source text


def words_of_list(run: Sequence[Tree], script: str, where: Where) -> list[GivenWord] | None:
    """Return the words after the script in an argument list, or None without the script."""
    words = list(_flatten(run, where))
    for n, word in enumerate(words):
        if word.text == script and not word.free:
            return words[n + 1 :]
    return None


def words_of_mapping(args: Mapping[str, Tree], where: Where) -> list[GivenWord]:
    """Convert an `args` mapping to command-line words."""
    words: list[GivenWord] = []
    for name, value in args.items():
        place = (*where, name)
        if _is_left_out(value):
            continue
        words.append(GivenWord(f"--{name}", place))
        if value is not True:
            values = value if isinstance(value, list) else [value]
            words += _flatten(values, place)
    return words


def _is_left_out(value: Tree) -> bool:
    # Compared by identity, because 0 equals False and is a value.
    return value is None or value is False or value == []


def words_of_script(
    run: str, script: str, where: Where, starters: re.Pattern[str]
) -> list[GivenWord] | None:
    """Return the words after a script in a shell script, or None if they are uncertain.

    The script must name the file once, after a program in `starters` or its `-m`, on one line.
    """
    parts = _read_line(run, script)
    if parts.count(script) != 1:
        return None
    at = parts.index(script)
    if at == 0 or not starters.fullmatch(_program_before(parts, at)):
        return None
    words: list[GivenWord] = []
    for part in parts[at + 1 :]:
        # The empty argument '' is no operator, though it has no other character.
        if part and _SHELL_ENDS.issuperset(part):
            break
        is_free = _HOLE in part or _SHELL_SPECIAL.search(part) is not None
        words.append(GivenWord(part, where, is_free))
    return words


def _read_line(run: str, script: str) -> list[str]:
    """Return the words of the only line with a script, or none if they are uncertain."""
    text = re.sub(r"\{\{.*?\}\}", _HOLE, run, flags=re.DOTALL).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if script in line]
    if len(lines) != 1:
        return []
    # In a here-document the words may be text; after `cd` the file may be another one.
    if "<<" in text or _CHANGES_DIRECTORY.search(text):
        return []
    lexer = shlex.shlex(lines[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []  # a text of several lines


def _program_before(parts: Sequence[str], at: int) -> str:
    """Return the word that starts the script at `at`: the one before it, or before its `-m`."""
    before = at - 2 if parts[at - 1] == "-m" else at - 1
    return parts[max(before, 0)]


def _flatten(items: Sequence[Tree], where: Where) -> Iterator[GivenWord]:
    for n, item in enumerate(items):
        # A single value is at the place of its option: the caller has put it in a list.
        is_only_value = len(items) == 1 and not isinstance(item, list)
        place = where if is_only_value else (*where, n)
        if isinstance(item, list):
            yield from _flatten(item, place)
        elif item is not None:
            yield GivenWord(str(item), place, _is_free(item))


def _is_free(item: Tree) -> bool:
    """Return True if a text is a single template, which may expand to any number of words."""
    if not isinstance(item, str):
        return False
    text = item.strip()
    return text.startswith("{{") and text.endswith("}}")


def find_faults(
    script: str, takes: ScriptOptions, words: Sequence[GivenWord], where: Where
) -> list[WordFault]:
    """Return the argument errors that the script would report for any template values."""
    reader = _Words(script, takes)
    for word in words:
        if not reader.take(word):
            return reader.found
    reader.finish()
    reader.check_required(where)
    return reader.found


class _Words:
    """Checker of argument words in order, like argparse."""

    def __init__(self, script: str, takes: ScriptOptions) -> None:
        self._script, self._takes = script, takes
        self._option: ScriptOption | None = None  # whose values follow
        self._begin = GivenWord("", ())  # the word of this option
        self._values = 0  # number of values of the current option
        self._is_uncounted = False  # whether the number of words since then is unknown
        self._operands = 0
        self._given: set[str] = set()
        self._may_give_any = False  # whether a template may give any option
        self.found: list[WordFault] = []

    def take(self, word: GivenWord) -> bool:
        """Check the next word. Return False if the remaining words cannot be checked."""
        if word.free:
            self._take_template(word.text)
            return True
        flag, equals_sign, value = word.text.partition("=")
        is_computed_flag = flag.startswith("-") and "{{" in flag
        if is_computed_flag or word.text == "--":
            self._may_give_any = True
            return False
        if _is_flag(word.text):
            attached = value if equals_sign else None
            self._take_flag(flag, word, attached)
        else:
            self._take_value(word)
        return True

    def finish(self) -> None:
        """Check the value count of the last option."""
        if self._option and not self._is_uncounted:
            self._check_count(self._option)
        self._option, self._values, self._is_uncounted = None, 0, False

    def _check_count(self, option: ScriptOption) -> None:
        if self._values < option.least:
            count = "a value" if option.least == 1 else f"{option.least} values"
            self._say(f"{option.name} of {self._script} needs {count}", self._begin)

    def check_required(self, where: Where) -> None:
        """Report required options that are missing."""
        if self._may_give_any:
            return
        for option in self._takes.options:
            is_missing = option.required and option.name not in self._given
            if option.flags and is_missing:
                message = f"{self._script} needs the option {option.name}, which is not given"
                self.found.append(WordFault(message, where, f"add {option.name}"))

    # -- one word --

    def _take_flag(self, flag: str, word: GivenWord, value: str | None) -> None:
        self.finish()
        option = self._takes.find(flag)
        if option is None and not flag.startswith("--"):
            option = self._takes.find(flag[:2])  # -n5, -vq
            if option is not None:
                self._given.add(option.name)
                self._is_uncounted = True
                return
        if option is None:
            if self._takes.strict:
                self._say(f"{self._script} has no option {flag}", word, self._nearest(flag))
            self._is_uncounted = True  # following words are not checked as operands
            return
        self._given.add(option.name)
        self._option, self._begin = option, word
        if value is None:
            return
        if option.most == 0:
            self._say(f"{flag} of {self._script} takes no value", word)
        elif "{{" not in value:
            self._check_value(option, value, word)
        self._option = None
        self._is_uncounted = False

    def _nearest(self, flag: str) -> str:
        """Suggest a known option for an unknown option."""
        known: list[str] = []
        for option in self._takes.options:
            for each in option.flags:
                if each.startswith("--") and each != "--help":
                    known.append(each)
        fix = did_you_mean(flag, known)
        if fix or not known:
            return fix
        return f"it has {', '.join(known[:_SHOWN])}"

    def _take_value(self, word: GivenWord) -> None:
        option = self._option
        if option is not None and self._values < option.most:
            self._values += 1
            if "{{" not in word.text:
                self._check_value(option, word.text, word)
            return
        self._operands += 1
        room = sum(each.most for each in self._takes.operands)
        is_counted = self._takes.strict and not self._is_uncounted
        if is_counted and self._operands > room:
            self._say(f'{self._script} takes no argument "{word.text}"', word)

    def _take_template(self, text: str) -> None:
        """Accept a template that may expand to any number of words.

        The template counts as a value of the current option, if that may have one more, or may give
        any option.  A choice between two fixed texts may give only the options of these texts.
        """
        option = self._option
        self._is_uncounted = True
        if option is not None and self._values < option.most:
            self._values += 1
            return
        choice = _CHOICE.fullmatch(text.strip())
        if choice is None:
            self._may_give_any = True
            return
        for each in choice.groups():
            flag = each.strip("'")
            given = self._takes.find(flag) if flag.startswith("-") else None
            if given is not None:
                self._given.add(given.name)

    def _check_value(self, option: ScriptOption, value: str, word: GivenWord) -> None:
        if option.choices and value not in option.choices:
            what = join_or(option.choices)
            self._say(f'{option.name} of {self._script} takes {what}, not "{value}"', word)
        elif option.number and not _is_number(value, option.number):
            kind = "a whole number" if option.number == "int" else "a number"
            self._say(f'{option.name} of {self._script} takes {kind}, not "{value}"', word)

    def _say(self, message: str, word: GivenWord, fix: str = "") -> None:
        self.found.append(WordFault(message, word.where, fix, word.text))


def _is_flag(text: str) -> bool:
    """Return True if argparse reads a word as a flag, not as a value."""
    if not text.startswith("-") or text == "-":
        return False
    if _NEGATIVE.match(text):
        return False
    return " " not in text.partition("=")[0]


def _is_number(text: str, kind: str) -> bool:
    parse: type[int | float] = int if kind == "int" else float
    try:
        parse(text)
    except ValueError:
        return False
    return True
