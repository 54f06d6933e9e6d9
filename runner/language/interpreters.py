"""Find the words of a shell command that some interpreter evaluates as code.

In the shell's own commands (`eval`, `unset`, `test -v`, `let`, …) template values are refused
there, or must be numbers. In code for other interpreters (`sh -c`, `python -c`, `ssh`, `| sh`) they
cause a warning.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

# Marks in the text of a word: a value, and a value of a command inside that word.
VALUE = "\0"
INNER = "\1"

# What a value may be.  code, name: nothing; number: a whole number; operand: no text that begins
# with `-`; one: no list; program: anything, with a warning.
Role: TypeAlias = Literal["code", "name", "number", "operand", "one", "program"]


class CommandWord(NamedTuple):
    """One word of a shell command.

    `text` has no quotes. `redirect` is the operator before the word.
    """

    start: int
    end: int
    text: str
    redirect: str = ""


class ValueRestriction(NamedTuple):
    """Restriction on template values between two offsets, imposed by the command `by`."""

    role: Role
    start: int
    end: int
    by: str


class SourceWords(NamedTuple):
    """Words evaluated as code by the interpreter `by`, and whether it also evaluates its input."""

    by: str = ""
    words: Sequence[CommandWord] = ()
    input: bool = False


class _Program(NamedTuple):
    """Options through which an interpreter receives code.

    Letters of options: `code` for options with code as argument, `file` for options with a code
    file, `input` for options that read code from the input. `takes`: options with any other
    argument.
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
_READ_ANY_WORD = frozenset({"ssh", "su", "sudo", "doas", "xargs", "parallel", "source", "."})
"""Commands of which any word may be source."""
_CARRIERS = frozenset(
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
"""Commands whose operands are another command."""
_SSH_TAKES = frozenset(f"-{letter}" for letter in "BbcDEeFIiJLlmOopQRSWw")
_INPUT = re.compile(r"-|/dev/stdin|/dev/fd/.*|/proc/self/fd/.*")

_READS_ALL = frozenset({"eval", "alias", "bind", "compgen", "complete", "fc"})
_DECLARING = frozenset({"declare", "typeset", "local", "export", "readonly"})
# Commands whose operands name variables, with the letters of options that take something else.
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
EXPANDED = frozenset({"PS0", "PS1", "PS2", "PS4", "PROMPT_COMMAND", "BASH_ENV", "ENV"})
"""Variables whose text a shell expands."""
_NUMBERS = frozenset(
    {"RANDOM", "SRANDOM", "SECONDS", "OPTIND", "HISTCMD", "LINENO", "BASHPID", "EPOCHSECONDS"}
)
"""Variables whose value a shell computes."""


def find_restrictions(words: Sequence[CommandWord]) -> Iterator[ValueRestriction]:
    """Yield the restrictions on template values in one command."""
    for word in words:
        if word.redirect:
            yield ValueRestriction("one", word.start, word.end, word.redirect)
        if word.redirect in (">&", "<&"):
            # bash expands a word that is no number a second time.
            yield ValueRestriction("number", word.start, word.end, word.redirect)
    command = _strip_prefixes(words)
    if command:
        yield from _restrict_builtin(command)


def parse_assignment(word: CommandWord) -> tuple[str, Role | None] | None:
    """Return the variable set by an assignment word and the role of its value, or None."""
    found = _FIXED_ASSIGNMENT.match(word.text)
    if found is None:
        return None
    name = found[1]
    if name in EXPANDED:
        return name, "code"
    if name in _NUMBERS:
        return name, "number"
    return name, None


def find_evaluated(words: Sequence[CommandWord]) -> Iterator[str]:
    """Yield the variables that a command declares as integers or name references.

    A shell evaluates the values of such variables.
    """
    command = _strip_prefixes(words)
    if not command or command[0].text not in ("declare", "typeset", "local"):
        return
    if {"i", "n"}.isdisjoint(_option_letters(command)):
        return
    for word in command[1:]:
        if word.text[:1] not in ("-", "+"):
            yield word.text.partition("=")[0]


def declares(words: Sequence[CommandWord], name: str, arrays: Container[str]) -> bool:
    """Return True if a partly read command may set an array variable.

    The variable is in `arrays`, or the command declares it as an array.
    """
    command = _strip_prefixes(words)
    if not command or command[0].text not in _DECLARING:
        return False
    if name in arrays:
        return True
    if not {"a", "A"}.isdisjoint(_option_letters(command)):
        return True
    # A word that begins with an expansion may become the option `-a`.
    return any(word.text[:1] in ("$", "`", VALUE, INNER) for word in command[1:])


# -- the shell's own commands --


def _strip_prefixes(words: Sequence[CommandWord]) -> list[CommandWord]:
    """Return a command without redirections and without a leading `command -p` or `builtin`."""
    command = [word for word in words if not word.redirect]
    while command and command[0].text in ("command", "builtin"):
        at = 1
        while at < len(command) and command[at].text.startswith("-"):
            at += 1
        command = command[at:]
    return command


def _option_letters(command: Sequence[CommandWord]) -> str:
    """Return the letters of all single-letter options of a command."""
    return "".join(word.text[1:] for word in command[1:] if word.text[:1] in ("-", "+"))


def _restrict_builtin(command: Sequence[CommandWord]) -> Iterator[ValueRestriction]:
    """Yield the restrictions of a shell builtin on its words."""
    head = command[0].text
    if head in _READS_ALL:
        yield from _restrict_all(command, "code")
    elif head == "let":
        yield from _restrict_all(command, "number")
    elif head == "trap":
        yield from _restrict_trap(command)
    elif head in _NAMING:
        yield from _restrict_names(command, _NAMING[head])
    elif head == "printf":
        yield from _restrict_option_value(command, "-v")
    elif head == "wait":
        yield from _restrict_option_value(command, "-p")
    elif head in _TESTS:
        yield from _restrict_test(command)


def _restrict_all(command: Sequence[CommandWord], role: Role) -> Iterator[ValueRestriction]:
    for word in command[1:]:
        yield ValueRestriction(role, word.start, word.end, command[0].text)


def _restrict_trap(command: Sequence[CommandWord]) -> Iterator[ValueRestriction]:
    """Yield the restriction on the first operand of `trap`, which is code."""
    for word in command[1:]:
        if word.text not in ("--", "-p", "-l"):
            yield ValueRestriction("code", word.start, word.end, command[0].text)
            return


def _restrict_names(command: Sequence[CommandWord], takes: str) -> Iterator[ValueRestriction]:
    """Yield the restrictions on operands that are variable names.

    `takes` has the letters of options with another argument.
    """
    options = "" if takes else _option_letters(command)
    for before, word in pairwise(command):
        role = _role_of_name(before.text, word, takes, options)
        if role is not None:
            yield ValueRestriction(role, word.start, word.end, command[0].text)


def _role_of_name(before: str, word: CommandWord, takes: str, options: str) -> Role | None:
    """Return the role of a template value in an operand, or None if any text is allowed."""
    found = parse_assignment(word)
    if found is not None:
        if "i" in options:
            return "number"
        return "name" if "n" in options else found[1]
    if takes:
        option = f"-[A-Za-z]*[{takes}]"
        # The argument of an option: the next word, or the rest of the option's word.
        if re.fullmatch(option, before) or re.match(option, word.text):
            return None
    return "name"


def _restrict_option_value(
    command: Sequence[CommandWord], option: str
) -> Iterator[ValueRestriction]:
    """Yield the restrictions of `printf -v` and `wait -p`, whose option argument is a variable
    name.

    No operand may become this option.
    """
    head = command[0].text
    for before, word in pairwise(command):
        if word.text == "--":
            return
        if before.text == option or word.text.startswith("-"):
            yield ValueRestriction("name", word.start, word.end, head)
            continue
        yield ValueRestriction("operand", word.start, word.end, head)
        if head == "printf":
            return


def _restrict_test(command: Sequence[CommandWord]) -> Iterator[ValueRestriction]:
    head = command[0].text
    for at, word in enumerate(command[1:], 1):
        before = command[at - 1].text
        after = command[at + 1].text if at + 1 < len(command) else "]"
        # `[[` parses its words before it expands them, `[` afterwards.
        may_be_operator = head != "[[" and word.text.startswith(VALUE)
        yield ValueRestriction("one", word.start, word.end, head)
        if before in ("-v", "-R"):
            yield ValueRestriction("name", word.start, word.end, head)
        elif before in COMPARES_NUMBERS or after in COMPARES_NUMBERS:
            yield ValueRestriction("number", word.start, word.end, head)
        elif may_be_operator and after not in _BETWEEN:
            yield ValueRestriction("operand", word.start, word.end, head)


# -- other interpreters --


def find_source(words: Sequence[CommandWord]) -> SourceWords:
    """Return the words of a command that another interpreter evaluates as code."""
    command = _strip_prefixes(words)
    if not command:
        return SourceWords()
    head = command[0].text
    found = _source_of_head(command)
    # A carrier such as `env` runs the next command in its words.
    is_waiting = head in _CARRIERS
    for at, word in enumerate(command):
        is_variable = at == 0 and "$" in head
        program = _SHELL if is_variable else _find_program(word.text)
        if program is None:
            continue
        read = _read_arguments(command[at + 1 :], program)
        is_head = at == 0 and not is_variable
        if is_waiting or is_head:
            own = _values_of_env(command[:at]) if head == "env" else []
            found = _merge(
                found, SourceWords(_base_name(word.text), [*own, *read.words], read.input)
            )
            is_waiting = False
        elif _has_code(read.words, program):
            found = _merge(found, SourceWords(_base_name(word.text), read.words))
    return found


def _source_of_head(command: Sequence[CommandWord]) -> SourceWords:
    """Return the words evaluated by a command such as `ssh` or `xargs`."""
    head = command[0].text
    name = _base_name(head)
    if name in _READ_ANY_WORD:
        return SourceWords(name, command, _reads_input(name, command))
    if VALUE in head and any(VALUE in word.text for word in command[1:]):
        return SourceWords("a command from a template", command)
    return SourceWords()


def _merge(found: SourceWords, more: SourceWords) -> SourceWords:
    """Merge two sets of evaluated words. The first interpreter gives the name."""
    return SourceWords(found.by or more.by, [*found.words, *more.words], found.input or more.input)


def _values_of_env(command: Sequence[CommandWord]) -> list[CommandWord]:
    """Return the words of `env` before its command that are or may become options."""
    found: list[CommandWord] = []
    for word in command[1:]:
        if word.text.startswith((VALUE, "-")):
            found.append(word)
        elif "=" not in word.text:
            break
    return found


def _read_arguments(arguments: Sequence[CommandWord], program: _Program) -> SourceWords:
    """Return the options of an interpreter and the words that contain code.

    Without an option for code, the first operand is the code, or else the input.
    """
    read: list[CommandWord] = []
    at, has_source = 0, False
    while at < len(arguments):
        text = arguments[at].text
        if _reads_from_input(text, program):
            return SourceWords("", arguments, True)
        if text[:1] not in ("-", "+"):
            if not has_source:
                read.append(arguments[at])
            return SourceWords("", read)
        width = 1
        if _names_source(text, program):
            has_source = True
            width = 2
            read += arguments[at : at + 2]
        else:
            read.append(arguments[at])
            if _takes_argument(text, program):
                width = 2
        at += width
    return SourceWords("", read, not has_source)


def _reads_from_input(text: str, program: _Program) -> bool:
    """Return True if an argument makes an interpreter read code from its input, as `-` does."""
    if _INPUT.fullmatch(text):
        return True
    option = f"-[A-Za-z]*[{program.input}][A-Za-z]*"
    return bool(program.input and re.fullmatch(option, text))


def _names_source(text: str, program: _Program) -> bool:
    """Return True if the argument of an option is code or a code file."""
    if _is_code(text, program):
        return True
    return bool(program.file and re.fullmatch(f"-[A-Za-z]*[{program.file}]", text))


def _takes_argument(text: str, program: _Program) -> bool:
    """Return True if an option has an argument. In shells, the option may end a letter group."""
    if text in program.takes:
        return True
    return program is _SHELL and f"-{text[-1]}" in program.takes


def _is_code(text: str, program: _Program) -> bool:
    """Return True if the argument of an option is code."""
    return text in _CODE_AT_LENGTH or re.match(f"-[A-Za-z]*[{program.code}]", text) is not None


def _has_code(words: Iterable[CommandWord], program: _Program) -> bool:
    """Return True if any of the words is an option whose argument is code."""
    return any(_is_code(word.text, program) for word in words)


def _reads_input(name: str, command: Sequence[CommandWord]) -> bool:
    """Return True if a command such as `source` or `su` evaluates its input."""
    operands = command[1:]
    match name:
        case "source" | ".":
            return _has_input_path(operands)
        case "su":
            return not _has_code(operands, _SHELL)
        case "parallel":
            return True
        case "xargs":
            return any(_find_program(word.text) for word in operands)
        case "ssh":
            return _inner_reads_input(command[_skip_host(command) :])
        case _:
            return _starts_shell(operands) or _inner_reads_input(operands)


def _has_input_path(words: Iterable[CommandWord]) -> bool:
    """Return True if any of the words is the path of the standard input."""
    return any(_INPUT.fullmatch(word.text) for word in words)


def _starts_shell(operands: Iterable[CommandWord]) -> bool:
    """Return True if `sudo` or `doas` has an option that starts a shell."""
    return any(part.text in ("-s", "-i") for part in _split_at_spaces(operands))


def _inner_reads_input(carried: Sequence[CommandWord]) -> bool:
    """Return True if the command inside `ssh` or `sudo` evaluates its input.

    Without a command, these start a shell.
    """
    rest = list(_split_at_spaces(carried))
    if not rest:
        return True
    for at, word in enumerate(rest):
        if _find_program(word.text) or word.text in _READ_ANY_WORD:
            return find_source(rest[at:]).input
    return False


def _split_at_spaces(words: Iterable[CommandWord]) -> Iterator[CommandWord]:
    """Yield the parts of words as words: `ssh` gives its quoted command to a shell."""
    for word in words:
        for part in word.text.split():
            yield word._replace(text=part)


def _skip_host(command: Sequence[CommandWord]) -> int:
    """Return the index of the first word after the options and the host of `ssh`."""
    at = 1
    while at < len(command) and command[at].text.startswith("-"):
        at += 2 if command[at].text in _SSH_TAKES else 1
    return at + 1


def _find_program(text: str) -> _Program | None:
    """Return the interpreter named by a word, or None for other programs."""
    name = _base_name(text)
    return next((program for pattern, program in _PROGRAMS if pattern.fullmatch(name)), None)


def _base_name(text: str) -> str:
    return text.rpartition("/")[2]
