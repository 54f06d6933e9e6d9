"""Render the templates of a step before it runs, with unknown values, to find errors early.

A failure here is a failure in every attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..language import shell
from ..language.template import (
    StatePath,
    TemplateError,
    args,
    argv,
    evaluate,
    join_path,
    program,
    references,
    render,
    text_of,
)
from ..language.unknowns import (
    A_TEXT,
    AN_INTEGER,
    ANYTHING,
    BOOLEAN,
    GIVEN,
    Unknown,
    kinds_of,
    unknown,
)
from .mentions import find_templates, is_template, walk
from .step import MetricAsked, RunSettings, StepSpec, unwritable

if TYPE_CHECKING:
    from ..language.values import Where

_HOST = {"gpus": AN_INTEGER, "cpus": AN_INTEGER}


class Scene(NamedTuple):
    """Values for a trial of a step's templates, some of them unknown.

    `optional` maps names that may be null to their value when they are not null.  Both are tried.
    """

    names: Mapping[str, Any]
    optional: Mapping[tuple[str, ...], object] = MappingProxyType({})


def scene_of(spec: StepSpec, id: str, recipe: str = "") -> Scene:
    """Return the template values of a compiled step before its first attempt."""
    steps: dict[str, dict[str, object]] = {}
    for step, outputs in spec.names.steps.items():
        steps[step] = dict(outputs)
    for step, asked in spec.asks.items():
        of = steps.setdefault(step, {})
        of["metrics"] = _unknown_metrics(each for each in asked if not each.same)
        paired = [each for each in asked if each.same]
        if paired:
            same = cast("dict[str, object]", of.get("same") or {})
            of["same"] = {**same, "metrics": _unknown_metrics(paired)}
    names = {
        **spec.names._asdict(),
        "steps": steps,
        "state": {each.name: StatePath(each.path, {"latest": None}) for each in spec.state},
        "run": {"id": A_TEXT, "recipe": recipe or A_TEXT},
        "step": {"id": id, "key": A_TEXT},
        "node": {"rank": AN_INTEGER},
        "nodes": {"count": AN_INTEGER, "addresses": unknown("list", items=A_TEXT)},
        "host": _HOST,
    }
    return Scene(names)


def _unknown_metrics(asked: Iterable[MetricAsked]) -> dict[str, object]:
    metrics: dict[str, object] = {}
    for each in asked:
        metrics[each.metric] = unknown("list", items=ANYTHING) if each.many else ANYTHING
    return metrics


def faults(spec: StepSpec, scene: Scene) -> Iterator[tuple[Where, TemplateError]]:
    """Yield the location and error of each part of a step that no attempt can render."""
    run = spec.run
    if isinstance(run, str):
        if _suspect(run):
            bash = spec.shell == "bash"
            yield from _try_part(("run",), [run], partial(_script, run, bash), scene)
    elif run is not None:
        yield from _argv_faults(run, scene)
    if spec.accelerate is not None:
        yield from _accelerate_faults(spec.accelerate, scene)
    for path, tree in spec.files.items():
        yield from _file_faults(path, tree, scene)
    for where, leaf in walk(dict(spec.env), ("env",)):
        if _suspect(leaf):
            yield from _try_part(where, [leaf], partial(_variable, leaf), scene)
    if isinstance(spec.when, str):
        when = spec.when
        yield from _try_part(("when",), [when], partial(_condition, when), scene)


def find_hook_faults(
    settings: RunSettings, inputs: Mapping[str, Any]
) -> Iterator[tuple[Where, TemplateError]]:
    """Yield the errors in setup, cleanup and health commands that cannot be rendered.

    Each has its location in the recipe.
    """
    scene = Scene({"inputs": inputs, "host": _HOST})
    commands: list[tuple[Where, Any]] = []
    for n, command in enumerate(settings.setup):
        commands.append((("setup", n), command))
    for n, command in enumerate(settings.cleanup):
        commands.append((("cleanup", n), command))
    if settings.health is not None:
        commands.append((("health", "run"), settings.health.run))
    for where, command in commands:
        for below, error in faults(StepSpec("", "", {}, run=command), scene):
            yield (*where, *below[1:]), error


def is_never_true(when: object, scene: Scene) -> bool:
    """Return whether a `when` condition is false whatever the unknown values are."""
    if not isinstance(when, str):
        return when is False
    try:
        return evaluate(when, scene.names) is False
    except TemplateError:
        return False


def _argv_faults(items: Sequence[Any], scene: Scene) -> Iterator[tuple[Where, TemplateError]]:
    wrong = False
    for where, leaf in walk(items, ("run",)):
        if _suspect(leaf):
            found = list(_try_part(where, [leaf], partial(argv, [leaf]), scene))
            wrong |= bool(found)
            yield from found
    # A command with a literal item cannot be empty.
    is_literal = any(isinstance(item, str) and not is_template(item) for item in items)
    if not wrong and not is_literal:
        yield from _try_part(("run",), find_templates(items), partial(_words, items), scene)


def _accelerate_faults(
    block: Mapping[str, Any], scene: Scene
) -> Iterator[tuple[Where, TemplateError]]:
    for name, value in block.items():
        where: Where = ("accelerate", name)
        if name == "args":
            continue
        if name == "processes" and value is not None:
            yield from _try_part(where, [value], partial(_count, value), scene)
        elif name in ("script", "module"):
            yield from _try_part(where, [value], partial(program, value), scene)
        elif _suspect(value):
            # Null leaves the launcher's setting at its default, as it leaves a variable unset.
            yield from _try_part(where, [value], partial(_variable, value), scene)
    yield from _find_args_faults(block.get("args"), scene)


def _find_args_faults(given: object, scene: Scene) -> Iterator[tuple[Where, TemplateError]]:
    """Yield the faults of `args` in `accelerate`, a mapping of options or a list of words."""
    where: Where = ("accelerate", "args")
    if isinstance(given, Mapping):
        for name, value in given.items():
            use = partial(args, {name: value})
            yield from _try_part((*where, name), find_templates(value), use, scene)
    elif isinstance(given, list):
        for place, leaf in walk(given, where):
            if _suspect(leaf):
                yield from _try_part(place, [leaf], partial(argv, [leaf]), scene)


def _file_faults(path: str, tree: Any, scene: Scene) -> Iterator[tuple[Where, TemplateError]]:
    wrong = False
    for where, leaf in walk(tree, ("files", path)):
        if is_template(leaf):
            found = list(_try_part(where, [leaf], partial(evaluate, leaf), scene))
            wrong |= bool(found)
            yield from found
    if not wrong:
        use = partial(_check_file_text, path, tree)
        yield from _try_part(("files", path), find_templates(tree), use, scene)


# -- one part of a step ----------------------------------------------------------------------------


def _try_part(
    where: Where,
    leaves: Iterable[Any],
    use: Callable[[Mapping[str, Any]], object],
    scene: Scene,
) -> Iterator[tuple[Where, TemplateError]]:
    """Try to render a part of a step, and yield its location and error.

    `use` renders the part, and `leaves` are its templates.
    """
    error = _error(use, scene.names)
    mentioned = [] if error is None and not scene.optional else list(_paths(leaves))
    if error is not None:
        yield where, _blame_null(error, mentioned, use, scene)
        return
    for path in mentioned:
        if path in scene.optional:
            error = _error(use, _with_value(scene.names, path, scene.optional[path]))
            if error is not None:
                yield where, _prefix_error(f"where {join_path(path)} has a value: ", error)
                return


def _error(
    use: Callable[[Mapping[str, Any]], object], names: Mapping[str, Any]
) -> TemplateError | None:
    try:
        use(names)
    except TemplateError as error:
        return error
    return None


def _blame_null(
    error: TemplateError,
    mentioned: Iterable[tuple[str, ...]],
    use: Callable[[Mapping[str, Any]], object],
    scene: Scene,
) -> TemplateError:
    """Return a template error that names the null value that causes it.

    If an error remains without nulls, return that error.
    """
    nulls = [path for path in mentioned if _is_null(scene.names, path)]
    for path in nulls:
        if _error(use, _with_value(scene.names, path, scene.optional.get(path, GIVEN))) is None:
            moment = "on the first attempt" if path[0] == "state" else "here"
            return _prefix_error(f"{join_path(path)} is null {moment}: ", error)
    names = scene.names
    for path in nulls:
        names = _with_value(names, path, scene.optional.get(path, GIVEN))
    return _error(use, names) or error


def _prefix_error(words: str, error: TemplateError) -> TemplateError:
    return TemplateError(f"{words}{error}", error.offset, error.length, error.fix)


def _paths(leaves: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """Yield each name that templates read, once."""
    found: dict[tuple[str, ...], None] = {}
    for leaf in filter(is_template, leaves):
        try:
            paths = [ref.path for ref in references(leaf)]
        except TemplateError:
            continue
        for path in paths:
            # Of `inputs.x.y`, the input x may be null; of `state.x.latest`, the last part.
            name = path if path[0] == "state" else path[:2]
            found[name] = None
    yield from found


def _is_null(names: Mapping[str, Any], path: Sequence[str]) -> bool:
    value: Any = names
    for part in path:
        if isinstance(value, StatePath):
            value = value.parts
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return value is None


def _with_value(names: Mapping[str, Any], path: Sequence[str], value: object) -> Mapping[str, Any]:
    if not path:
        return names
    first, *rest = path
    if not rest:
        return {**names, first: value}
    inner = names[first]
    if isinstance(inner, StatePath):
        return {**names, first: StatePath(str(inner), _with_value(inner.parts, rest, value))}
    return {**names, first: _with_value(inner, rest, value)}


def _suspect(leaf: object) -> bool:
    return isinstance(leaf, str) and ("{{" in leaf or "\0" in leaf)


# -- rendering as in an attempt --------------------------------------------------------------------


def _script(text: str, bash: bool, names: Mapping[str, Any]) -> None:
    if "\0" in shell.script(text, names, bash=bash):
        raise TemplateError("a NUL character cannot be in a script", text.index("\0"), 1)


def _variable(leaf: Any, names: Mapping[str, Any]) -> None:
    value = evaluate(leaf, names)
    may_be_null = value.may_be_null if isinstance(value, Unknown) else value is None
    if may_be_null:
        return  # the variable stays unset
    try:
        text = text_of(value)
    except TemplateError as error:
        raise TemplateError(str(error), 0, len(leaf), error.fix) from None
    if "\0" in text:
        raise TemplateError("a NUL character cannot be in an argument", 0, len(leaf))


def _words(items: Sequence[Any], names: Mapping[str, Any]) -> None:
    if not argv(items, names):
        message = "the command is empty: every item is null or empty"
        raise TemplateError(message, 0, 0, "name the program to run")


def _count(value: Any, names: Mapping[str, Any]) -> None:
    """Check that a number of processes is a whole number, or null for one process per GPU.

    Raises TemplateError.
    """
    found: object = render(value, names)
    if isinstance(found, Unknown):
        wrong = found.kinds <= {"mapping", "fraction"}
    else:
        wrong = bool(found) and not str(found).strip().isdecimal()
    if wrong:
        length = len(value) if isinstance(value, str) else 1
        raise TemplateError("the number of processes must be a whole number", 0, length)


def _check_file_text(path: str, tree: Any, names: Mapping[str, Any]) -> None:
    wrong = unwritable(path, kinds_of(render(tree, names)))
    if wrong:
        length = len(tree) if isinstance(tree, str) else 1
        fix = "use one of these suffixes, or write the content of the file as text"
        raise TemplateError(wrong, 0, length, fix)


def _condition(leaf: str, names: Mapping[str, Any]) -> None:
    value = evaluate(leaf, names)
    if BOOLEAN not in kinds_of(value):
        what = value.word if isinstance(value, Unknown) else "no boolean"
        fix = 'use a boolean expression, such as "{{ inputs.steps > 10 }}"'
        raise TemplateError(f"`when` is {what}, not true or false", 0, len(leaf), fix)
