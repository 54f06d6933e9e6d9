"""Insert template values into a shell script, safe from code injection.

Every expression becomes a variable that is assigned before the script: `"${_recipe_1}"` where words
are split, `${_recipe_1}` inside quotes. A shell does not parse the value of a variable as code, so
an error of `shell_reader` can only cause word splitting. Where a shell evaluates a value
(arithmetic, variable names, `eval`), only a whole number or nothing is allowed; `interpreters`
knows these commands. /bin/sh may be bash, so bash's rules apply to `sh` too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .interpreters import VALUE, CommandWord, find_source
from .shell_reader import read
from .shell_values import Doubt, Position, read_as_source
from .template import Expression, Reads, Scope, TemplateError, expressions, has
from .unknowns import INTEGER, LIST, TEXT, Unknown

_NUMBER = re.compile(r"[+-]?[0-9]+")


def script(text: str, scope: Scope, reads: Reads | None = None, *, bash: bool = False) -> str:
    """Replace template expressions in a shell script by safe shell variables.

    Raises TemplateError.
    """
    if not has(text):
        return text
    reading = read(text, bash)
    if reading.errors:
        raise reading.errors[0]
    writer = _ScriptWriter(text, scope, reads)
    for expression, position in zip(expressions(text), reading.places, strict=True):
        writer.write(expression, position)
    return writer.finish()


class _ScriptWriter:
    """Writer that replaces a script's expressions by shell variables, in order."""

    def __init__(self, text: str, scope: Scope, reads: Reads | None) -> None:
        self._text, self._scope, self._reads = text, scope, reads
        self._assignments: list[str] = []
        self._parts: list[str] = []  # of the script
        self._end = 0  # index behind the last expression
        self._count = 0  # expressions so far
        self._prefix = "_recipe"  # prefix of variables; absent from the script
        while self._prefix in text:
            self._prefix += "_"

    def write(self, expression: Expression, position: Position) -> None:
        """Replace the next expression by a shell variable."""
        self._parts.append(self._text[self._end : expression.offset])
        self._end = expression.offset + expression.length
        self._count += 1
        variable = f"{self._prefix}_{self._count}"
        if position.role == "comment":
            # The variable stays unset: null is no mistake where nothing is read.
            self._parts.append(f"${{{variable}}}")
            return
        value = expression.value(self._scope, self._reads)
        variables = _variables(variable, value, position)
        words = [self._assign(name, each, expression, position) for name, each in variables]
        self._parts.append(" ".join(words))

    def finish(self) -> str:
        """Return the complete script, with variable assignments first."""
        return "".join((*self._assignments, *self._parts, self._text[self._end :]))

    def _assign(self, name: str, value: object, expression: Expression, position: Position) -> str:
        """Assign a value to a shell variable, and return the word that expands the variable."""
        text = expression.text(value)
        _check_value(value, text, expression, position)
        self._assignments.append(f"{name}={_quote(text)}\n")
        if not position.quoted:
            return f'"${{{name}}}"'
        if position.role == "number" and text.startswith("-"):
            return f"(${{{name}}})"
        return f"${{{name}}}"


def _variables(variable: str, value: object, position: Position) -> list[tuple[str, object]]:
    """Return the shell variables for a value. A list as a whole word has one variable per item."""
    if not position.alone:
        return [(variable, value)]
    if isinstance(value, Unknown):
        is_list = value.textless and LIST in value.kinds
        return [] if is_list else [(variable, value)]  # a list may have no items
    if isinstance(value, (list, tuple)):
        return [(f"{variable}_{number}", item) for number, item in enumerate(value, 1)]
    return [(variable, value)]


def _check_value(value: object, text: str, expression: Expression, position: Position) -> None:
    """Raise TemplateError for a value that the shell would evaluate or parse as an option."""
    offset, length = expression.offset, expression.length
    if "\0" in text:
        raise TemplateError("a NUL character cannot be in a script", offset, length)
    if position.role == "number" and not _may_be_whole(value, text):
        shown = value.word if isinstance(value, Unknown) else f"`{text[:40]}`"
        message = f"only a whole number is allowed here, not {shown}: the shell would evaluate it"
        raise TemplateError(message, offset, length)
    if position.role == "operand" and text.startswith("-"):
        message = f"the command would read `{text[:40]}` as an option"
        fix = "put `--` before the value, or write `printf '%s' {{ … }}`"
        raise TemplateError(message, offset, length, fix)


def _may_be_whole(value: object, text: str) -> bool:
    """Return True if a value is or may be an integer."""
    if isinstance(value, Unknown):
        return bool(value.kinds & {INTEGER, TEXT})
    return _NUMBER.fullmatch(text) is not None


def errors(text: str, *, bash: bool = False) -> tuple[TemplateError, ...]:
    """Return the errors of template expressions at positions where no value is allowed.

    If an expression is invalid, only its error.
    """
    try:
        return read(text, bash).errors if has(text) else ()
    except TemplateError as error:
        return (error,)


def warnings(text: str, bash: bool = False) -> list[Doubt]:
    """Return probable mistakes in a shell script in order, or none if an expression is invalid."""
    try:
        reading = read(text, bash)
    except TemplateError:
        return []
    doubts = list(reading.warnings)
    if not bash:
        message = "a failure before this pipe goes unnoticed: set `shell: bash`"
        doubts = [*(Doubt("pipe", message, at, 1) for at in reading.pipes), *doubts]
    return sorted(doubts, key=lambda doubt: doubt.offset)


def doubts_of_arguments(items: Sequence[str]) -> Iterator[tuple[int, Doubt]]:
    """Yield doubts about command arguments that an interpreter evaluates as code.

    Each with its index and a fix; none if an expression is invalid.
    """
    try:
        words = [CommandWord(at, at + 1, _mark_values(item)) for at, item in enumerate(items)]
    except TemplateError:
        return
    found = find_source(words)
    # One argument may be named twice, by `env` and by the command that it starts.
    positions = dict.fromkeys(word.start for word in found.words if VALUE in word.text)
    for at in positions:
        yield at, read_as_source(found.by, 0, len(items[at]))


def _mark_values(item: str) -> str:
    """Replace each expression in an argument by a placeholder mark. Raises TemplateError."""
    text, end = "", 0
    for expression in expressions(item):
        text += item[end : expression.offset] + VALUE
        end = expression.offset + expression.length
    return text + item[end:]


def _quote(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
