"""What is wrong with the parts of a step that read nothing: they fail in every attempt, so they are refused before the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .mentions import is_template, walk

if TYPE_CHECKING:
    from ..language.recipe import Step
    from ..language.template import TemplateError
    from ..language.values import Where


def faults(step: Step, env: Mapping[str, Any]) -> Iterator[tuple[Where, TemplateError]]:
    """The place and the TemplateError of every constant that no attempt can use."""
    if isinstance(step.run, list):
        yield from _argv(step.run, (*step.origin, "run"))
    elif isinstance(step.run, str) and _suspect(step.run) and _constant(step.run):
        yield from _script(step.run, step.shell == "bash", (*step.origin, "run"))
    for where, leaf in walk(dict(env), (*step.origin, "env")):
        if _suspect(leaf) and _constant(leaf):
            yield from _arguments([leaf], where)[1]


def _argv(items: Sequence[Any], where: Where) -> Iterator[tuple[Where, TemplateError]]:
    """Faults of the items; and that there is no word in a command whose items are all constant."""
    count = 0
    for n, item in enumerate(items):
        if isinstance(item, str) and not _suspect(item):
            count += 1
        elif not all(_constant(leaf) for _, leaf in walk(item, ())):
            count += 1  # nothing is known of it
        else:
            words, wrong = _arguments([item], (*where, n))
            yield from wrong
            count += words + len(wrong)
    if items and not count:
        from ..language.template import TemplateError

        yield (
            where,
            TemplateError(
                "this command has no words: every item is null or empty",
                0,
                0,
                "name the program to run",
            ),
        )


def _arguments(items: list[Any], where: Where) -> tuple[int, list[tuple[Where, TemplateError]]]:
    from ..language.template import TemplateError, argv

    try:
        return len(argv(items, {})), []
    except TemplateError as error:
        return 0, [(where, error)]


def _script(text: str, bash: bool, where: Where) -> Iterator[tuple[Where, TemplateError]]:
    from ..language.shell import script
    from ..language.template import TemplateError

    try:
        if "\0" in script(text, {}, bash=bash):
            raise TemplateError("a NUL character cannot be in a script", text.index("\0"), 1)
    except TemplateError as error:
        yield where, error


def _suspect(leaf: object) -> bool:
    return is_template(leaf) or (isinstance(leaf, str) and "\0" in leaf)


def _constant(leaf: object) -> bool:
    from ..language.template import TemplateError, references

    if not is_template(leaf):
        return True
    try:
        return not references(str(leaf))
    except TemplateError:  # reported where it is read
        return False
