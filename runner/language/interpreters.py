"""Which words of a command are read again as source.

The shell's own commands that read a word again (`eval`, `unset`, `test -v`, `let`, …) allow no value there, or only a number.  What a script hands to
another interpreter (`sh -c`, `python -c`, `ssh`, `| sh`) is its author's: that is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Literal, NamedTuple, TypeAlias

VALUE, INNER = (
    "\0",
    "\1",
)  # in the text of a word: a value, and a value of a command inside that word

# What a value may be.  code, name: nothing; number: a whole number; operand: nothing that begins with `-`; one: no list; program: anything, with a
# warning.
Role: TypeAlias = Literal["code", "name", "number", "operand", "one", "program"]


class Word(NamedTuple):
    """One word of a command, `text` without its quotes.  `redirect` is the operator in front of it."""

    start: int
    end: int
    text: str
    redirect: str = ""


class Ruling(NamedTuple):
    """What the values between two offsets may be, because of the command `by`."""

    role: Role
    start: int
    end: int
    by: str


class Source(NamedTuple):
    """The words that the interpreter `by` reads as source, and whether it reads its input so."""

    by: str = ""
    words: Sequence[Word] = ()
    input: bool = False


class _Program(NamedTuple):
    """How an interpreter gets its source.

    `code`: letters of options whose argument is source.  `file`: letters of options whose argument names the source.  `input`: letters of options
    that make it read its input.  `takes`: options with another argument.
    """

    code: str
    file: str = ""
    input: str = ""
    takes: frozenset[str] = frozenset()


_FIXED_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[.*\])?\+?=", re.DOTALL)
_SHELL = _Program(
    "c", input="s", takes=frozenset({"-o", "+o", "-O", "+O", "--rcfile", "--init-file"})
)
_PROGRAMS: tuple[tuple[re.Pattern[str], _Program], ...] = (
    (re.compile(r"sh|bash|dash|ash|[lm]?ksh|zsh|fish"), _SHELL),
    (
        re.compile(r"(?:python|pypy)[0-9.]*"),
        _Program("c", "m", takes=frozenset({"-W", "-X", "--check-hash-based-pycs"})),
    ),
    (
        re.compile(r"[gmn]?awk"),
        _Program("e", "f", takes=frozenset({"-v", "-F", "--assign", "--field-separator"})),
    ),
    (re.compile(r"perl[0-9.]*|ruby|lua|Rscript"), _Program("eE", takes=frozenset({"-I"}))),
    (
        re.compile(r"node|deno|bun"),
        _Program("ep", takes=frozenset({"-r", "--require", "--import"})),
    ),
    (re.compile(r"php"), _Program("r", "f", takes=frozenset({"-d"}))),
    (re.compile(r"sed"), _Program("e", "f")),
    (re.compile(r"psql"), _Program("c", "f", takes=frozenset({"-h", "-p", "-U", "-d"}))),
)
_CODE_AT_LENGTH = frozenset({"--command", "--eval", "--expression", "--source"})
_WHOLE = frozenset(
    {"ssh", "su", "sudo", "doas", "xargs", "parallel", "source", "."}
)  # any word of theirs may be source
_CARRIERS = frozenset(  # what follows is a command
    (
        "env",
        "exec",
        "nohup",
        "nice",
        "timeout",
        "setsid",
        "stdbuf",
        "ionice",
        "chrt",
        "taskset",
        "busybox",
        "unshare",
        "chroot",
        "flock",
    )
)
_SSH_TAKES = frozenset(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")
_INPUT = re.compile(r"-|/dev/stdin|/dev/fd/.*|/proc/self/fd/.*")

_READS_ALL = frozenset({"eval", "alias", "bind", "compgen", "complete", "fc"})
_DECLARING = frozenset({"declare", "typeset", "local", "export", "readonly"})
# Commands whose operands are names of variables, with the letters of those options that take something else.
_NAMING: Mapping[str, str] = {
    **dict.fromkeys(("unset", *_DECLARING), ""),
    "read": "dinNptu",
    **dict.fromkeys(("mapfile", "readarray"), "cdnOsu"),
}
_TESTS = frozenset({"test", "[", "[["})
COMPARES_NUMBERS = frozenset({"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})
_BETWEEN = COMPARES_NUMBERS | {
    "=",
    "==",
    "!=",
    "=~",
    "<",
    ">",
    "-nt",
    "-ot",
    "-ef",
    "-a",
    "-o",
    "]",
    ")",
}
EXPANDED = frozenset(
    {"PS0", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "BASH_ENV", "ENV"}
)  # a shell expands their text
_NUMBERS = frozenset(
    {"RANDOM", "SRANDOM", "SECONDS", "OPTIND", "HISTCMD", "LINENO", "BASHPID", "EPOCHSECONDS"}
)  # it computes theirs


def rulings(words: Sequence[Word]) -> Iterator[Ruling]:
    """What the values of one command may be, where they are not simply any text."""
    for word in words:
        if word.redirect:
            yield Ruling("one", word.start, word.end, word.redirect)
        if word.redirect in (">&", "<&"):  # bash expands what is no number a second time
            yield Ruling("number", word.start, word.end, word.redirect)
    command = _called(words)
    if command:
        yield from _builtin(command)


def assignment(word: Word) -> tuple[str, Role | None] | None:
    """The variable that a word sets, if it sets one, and what its value may be."""
    found = _FIXED_ASSIGNMENT.match(word.text)
    if found is None:
        return None
    return found[1], "code" if found[1] in EXPANDED else "number" if found[1] in _NUMBERS else None


def evaluated(words: Sequence[Word]) -> Iterator[str]:
    """The variables that a command makes integers or names of others: what is assigned to them is evaluated."""
    command = _called(words)
    if (
        command
        and command[0].text in ("declare", "typeset", "local")
        and not {"i", "n"}.isdisjoint(_options(command))
    ):
        yield from (
            word.text.partition("=")[0] for word in command[1:] if word.text[:1] not in ("-", "+")
        )


def declares(words: Sequence[Word], name: str, arrays: Container[str]) -> bool:
    """Whether a command, as far as it was read, may set a variable that is an array: one of `arrays`, or one that it makes an array."""
    command = _called(words)
    if not command or command[0].text not in _DECLARING:
        return False
    return (
        name in arrays
        or not {"a", "A"}.isdisjoint(_options(command))
        or any(word.text[:1] in ("$", "`", VALUE, INNER) for word in command[1:])
    )


# ---- the shell's own commands ----


def _called(words: Sequence[Word]) -> list[Word]:
    """A command without redirections, and without `command -p`, `builtin` and the like in front."""
    command = [word for word in words if not word.redirect]
    while command and command[0].text in ("command", "builtin"):
        at = 1
        while at < len(command) and command[at].text.startswith("-"):
            at += 1
        command = command[at:]
    return command


def _options(command: Sequence[Word]) -> str:
    return "".join(word.text[1:] for word in command[1:] if word.text[:1] in ("-", "+"))


def _builtin(command: Sequence[Word]) -> Iterator[Ruling]:
    head = command[0].text
    if head in _READS_ALL:
        yield from (Ruling("code", word.start, word.end, head) for word in command[1:])
    elif head == "trap":
        action = next((word for word in command[1:] if word.text not in ("--", "-p", "-l")), None)
        if action is not None:
            yield Ruling("code", action.start, action.end, head)
    elif head == "let":
        yield from (Ruling("number", word.start, word.end, head) for word in command[1:])
    elif head in _NAMING:
        yield from _naming(command, _NAMING[head])
    elif head in ("printf", "wait"):
        yield from _optional(command, "-v" if head == "printf" else "-p")
    elif head in _TESTS:
        yield from _test(command)


def _naming(command: Sequence[Word], takes: str) -> Iterator[Ruling]:
    head, options = command[0].text, "" if takes else _options(command)
    for before, word in pairwise(command):
        fixed = assignment(word)
        role: Role | None = "name"
        if fixed is not None:
            role = "number" if "i" in options else "name" if "n" in options else fixed[1]
        elif takes and (
            re.fullmatch(f"-[A-Za-z]*[{takes}]", before.text)
            or re.match(f"-[A-Za-z]*[{takes}]", word.text)
        ):
            role = None
        if role is not None:
            yield Ruling(role, word.start, word.end, head)


def _optional(command: Sequence[Word], option: str) -> Iterator[Ruling]:
    """`printf` and `wait` have one option that names a variable: no operand may turn into it."""
    head = command[0].text
    for before, word in pairwise(command):
        if word.text == "--":
            return
        if before.text == option or word.text.startswith("-"):
            yield Ruling("name", word.start, word.end, head)
            continue
        yield Ruling("operand", word.start, word.end, head)
        if head == "printf":
            return


def _test(command: Sequence[Word]) -> Iterator[Ruling]:
    head = command[0].text
    for at, word in enumerate(command[1:], 1):
        before, after = command[at - 1].text, command[at + 1].text if at + 1 < len(command) else "]"
        yield Ruling("one", word.start, word.end, head)
        if before in ("-v", "-R"):
            yield Ruling("name", word.start, word.end, head)
        elif before in COMPARES_NUMBERS or after in COMPARES_NUMBERS:
            yield Ruling("number", word.start, word.end, head)
        elif head != "[[" and after not in _BETWEEN and word.text.startswith(VALUE):
            yield Ruling("operand", word.start, word.end, head)


# ---- other interpreters ----


def source(words: Sequence[Word]) -> Source:
    """What of a command is source for an interpreter that it starts."""
    command = _called(words)
    if not command:
        return Source()
    head = command[0].text
    exposed: list[Word] = []
    by, reads_input = "", False
    if _base(head) in _WHOLE:
        by, exposed, reads_input = _base(head), command, _whole_reads_input(_base(head), command)
    elif VALUE in head and any(VALUE in word.text for word in command[1:]):
        by, exposed = "a command that a value names", command
    waiting = head in _CARRIERS  # for the command that it carries
    for at, word in enumerate(command):
        program = _SHELL if at == 0 and "$" in head else _program(word.text)
        if program is None:
            continue
        found = _read(command[at + 1 :], program)
        if waiting or (at == 0 and "$" not in head):
            own = takewhile(
                lambda each: each.text.startswith((VALUE, "-")) or "=" in each.text, command[1:at]
            )
            named = [each for each in own if head == "env" and each.text.startswith((VALUE, "-"))]
            by, exposed, reads_input = (
                by or _base(word.text),
                [*exposed, *named, *found.words],
                reads_input or found.input,
            )
            waiting = False
        elif any(_is_code(each.text, program) for each in found.words):
            by, exposed = by or _base(word.text), [*exposed, *found.words]
    return Source(by, exposed, reads_input)


def _read(tail: Sequence[Word], program: _Program) -> Source:
    """The options and the source itself; every word, and the input, where no word is the source."""
    read: list[Word] = []
    at, given = 0, False
    while at < len(tail):
        text = tail[at].text
        if _INPUT.fullmatch(text) or (
            program.input and re.fullmatch(f"-[A-Za-z]*[{program.input}][A-Za-z]*", text)
        ):
            return Source("", tail, True)
        if text[:1] not in ("-", "+"):
            return Source("", read if given else [*read, tail[at]])
        names_source = _is_code(text, program) or bool(
            program.file and re.fullmatch(f"-[A-Za-z]*[{program.file}]", text)
        )
        given = given or names_source
        read += tail[at : at + 1 + names_source]
        takes = text in program.takes or (program is _SHELL and f"-{text[-1]}" in program.takes)
        at += 2 if names_source or takes else 1
    return Source("", read, not given)


def _is_code(text: str, program: _Program) -> bool:
    return text in _CODE_AT_LENGTH or re.match(f"-[A-Za-z]*[{program.code}]", text) is not None


def _whole_reads_input(name: str, command: Sequence[Word]) -> bool:
    if name in ("source", "."):
        return any(_INPUT.fullmatch(word.text) for word in command[1:])
    if name == "su":
        return not any(_is_code(word.text, _SHELL) for word in command[1:])
    if name in ("xargs", "parallel"):
        return name == "parallel" or any(_program(word.text) for word in command)
    at = 1
    if name == "ssh":
        while at < len(command) and command[at].text.startswith("-"):
            at += 2 if command[at].text in _SSH_TAKES else 1
        at += 1  # the host
    rest = [word._replace(text=part) for word in command[at:] for part in word.text.split()]
    if not rest or (name != "ssh" and any(word.text in ("-s", "-i") for word in rest)):
        return True
    started = next(
        (i for i, word in enumerate(rest) if _program(word.text) or word.text in _WHOLE), None
    )
    return started is not None and source(rest[started:]).input


def _program(text: str) -> _Program | None:
    name = _base(text)
    return next((program for pattern, program in _PROGRAMS if pattern.fullmatch(name)), None)


def _base(text: str) -> str:
    return text.rpartition("/")[2]
