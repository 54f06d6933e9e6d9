"""Put values into a shell script.  The shell that runs the script never parses a value as source.

Every expression becomes a variable that is set in front of the script: `"${_recipe_1}"` where words are split, `${_recipe_1}` where quotes already
hold.  A shell does not read the value of a variable as source, so a wrong guess of `shell_reader` costs word splitting, never an injection.  Where
a shell does evaluate a value (arithmetic, names of variables, `eval`), only a whole number can stand, or nothing: `interpreters` knows the commands.
/bin/sh may be bash, so what bash evaluates counts for `sh` too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .interpreters import VALUE, Word, source
from .shell_reader import read
from .shell_values import Doubt, read_as_source
from .template import Reads, Scope, TemplateError, expressions, has, text_of
from .unknowns import INTEGER, LIST, TEXT, Unknown

_NUMBER = re.compile(r"[+-]?[0-9]+")


def script(text: str, scope: Scope, reads: Reads | None = None, *, bash: bool = False) -> str:
    """The whole script: one assignment for each value, and `text` with variables where its expressions were."""
    if not has(text):
        return text
    reading = read(text, bash)
    if reading.errors:
        raise reading.errors[0]
    prefix = "_recipe"
    while prefix in text:
        prefix += "_"
    prologue: list[str] = []
    parts: list[str] = []
    end = 0
    for number, (expression, place) in enumerate(
        zip(expressions(text), reading.places, strict=True), 1
    ):
        parts.append(text[end : expression.offset])
        end = expression.offset + expression.length
        variable = f"{prefix}_{number}"
        if place.role == "comment":  # it stays unset: null is no mistake where nothing is read
            parts.append(f"${{{variable}}}")
            continue
        value = expression.value(scope, reads)
        if isinstance(value, Unknown) and value.textless and LIST in value.kinds and place.alone:
            value = []  # as many words as it has items, which may be none
        values = {variable: value}
        if isinstance(value, (list, tuple)) and place.alone:
            values = {f"{variable}_{i}": each for i, each in enumerate(value, 1)}
        words: list[str] = []
        for name, each in values.items():
            try:
                word = text_of(each)
            except TemplateError as error:
                raise TemplateError(
                    str(error), expression.offset, expression.length, error.fix
                ) from None
            if "\0" in word:
                raise TemplateError(
                    "a NUL character cannot be in a script", expression.offset, expression.length
                )
            whole = (
                bool(each.kinds & {INTEGER, TEXT})
                if isinstance(each, Unknown)
                else _NUMBER.fullmatch(word)
            )
            if place.role == "number" and not whole:
                shown = each.word if isinstance(each, Unknown) else f"`{word[:40]}`"
                message = (
                    f"only a whole number can stand here, not {shown}: a shell would evaluate it"
                )
                raise TemplateError(message, expression.offset, expression.length)
            if place.role == "operand" and word.startswith("-"):
                message = f"`{word[:40]}` would be an option of this command"
                raise TemplateError(
                    message,
                    expression.offset,
                    expression.length,
                    "write `printf '%s' {{ … }}`, or `--` in front of it",
                )
            prologue.append(f"{name}={_single(word)}\n")
            plain = f"${{{name}}}"
            if place.quoted:
                words.append(
                    f"({plain})" if place.role == "number" and word.startswith("-") else plain
                )
            else:
                words.append(f'"{plain}"')
        parts.append(" ".join(words))
    parts.append(text[end:])
    return "".join(prologue) + "".join(parts)


def errors(text: str, *, bash: bool = False) -> tuple[TemplateError, ...]:
    """Every expression of a script that stands where no value can, whatever its value is; or the first that is none."""
    try:
        return read(text, bash).errors if has(text) else ()
    except TemplateError as error:
        return (error,)


def warnings(text: str, bash: bool = False) -> list[Doubt]:
    """What is probably not meant; nothing where an expression is none."""
    try:
        reading = read(text, bash)
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
        yield at, read_as_source(found.by, 0, len(items[at]))


def _single(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
