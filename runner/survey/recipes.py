"""Read the recipe of a request and the recipes that it uses, and bind its inputs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..digest import Digest, of_bytes, of_value
from ..errors import Invalid, NotFound, Problem
from ..language.library import find, schema_text
from ..paths import VERSION, CallerLocation, is_path, shipped
from ..reading import whole
from ..storage.workspace import Workspace
from .request import Request

if TYPE_CHECKING:
    from ..language.recipe import Input, Recipe, Step
    from ..language.values import Tree

_PATH_TYPES: Final = frozenset({"file", "dataset", "model"})
"""Types of inputs whose values are paths or addresses."""


def read_recipe(ws: Workspace, request: Request) -> tuple[Recipe, dict[str, Tree]]:
    """Read the recipe of a request and bind its inputs. Returns the recipe and input values.

    Raises NotFound, Invalid.
    """
    source = find(request.recipe, ws.root)
    return read_and_bind(ws, source, read_text(source), request, UsedRecipes(ws.root))


def read_and_bind(
    ws: Workspace, source: Path, text: bytes, request: Request, used: UsedRecipes
) -> tuple[Recipe, dict[str, Tree]]:
    """Parse a recipe's text, load its used recipes into `used`, and bind the inputs."""
    from ..language import unread

    recipe = parse_recipe(ws, text, str(source))
    if is_path(request.recipe):
        recipe = place_recipe(recipe, source, ws.root)
    used.load(recipe)
    environment = ws.environ if ws.asks_secrets else None
    values = bind_inputs(
        ws,
        recipe,
        request.inputs,
        preset=request.preset,
        environment=environment,
        origins=request.origins,
    )
    wrong = unread.find_refused(recipe, request.inputs, request.preset, request.origins)
    if wrong:
        raise Invalid(wrong)
    for name in request.typed_in.keys() & values.keys():
        location = CallerLocation(ws.root, request.typed_in[name])
        values[name] = _start_at_root(recipe.inputs[name], values[name], location)
    return recipe, values


def input_types(ws: Workspace, source: Path, request: Request) -> dict[str, dict[str, str]]:
    """Return the input types of a recipe and of its used recipes, by recipe ID.

    Raises NotFound, Invalid.
    """
    recipe = parse_recipe(ws, read_text(source), str(source))
    if is_path(request.recipe):
        recipe = place_recipe(recipe, source, ws.root)
    used = UsedRecipes(ws.root)
    used.load(recipe)
    types: dict[str, dict[str, str]] = {}
    for each in (*used.by_name.values(), recipe):
        types[each.id] = {name: spec.type for name, spec in each.inputs.items()}
    return types


# -- files ---------------------------------------------------------------------------------------


def read_text(source: Path) -> bytes:
    """Return the undecoded text of a recipe file. Raises NotFound."""
    try:
        return whole(source)
    except OSError as error:
        raise NotFound(f"cannot read {source}: {error.strerror}") from error


def parse_recipe(ws: Workspace, text: bytes, name: str) -> Recipe:
    """Parse a recipe's text. Text that passed the schema before is not validated again."""
    return _parse_once(text, name, schema_mark(ws, of_bytes(text)).exists())


# A first run reads its recipe before the workspace exists, and compiles it afterwards.
@lru_cache(maxsize=1)
def _parse_once(text: bytes, name: str, sound: bool) -> Recipe:
    from ..language import document, parse

    return parse.recipe(document.parse(text, name), sound=sound)


def schema_mark(ws: Workspace, text: Digest) -> Path:
    """Return the marker file recording that a recipe text passed schema validation.

    Schema validation takes longer than all other parsing.
    """
    try:
        schema = schema_text()
    except FileNotFoundError:  # a library with only recipes has no schema
        schema = ""
    return ws.home / "plans" / f"{of_value('sound', [VERSION, schema, text])}.sound"


def place_recipe(recipe: Recipe, source: Path, root: Path) -> Recipe:
    """Make a recipe's paths relative to the workspace, if the recipe was given by path.

    Library recipes keep their own directory.
    """
    from ..planning.roots import move_root

    if source.is_relative_to(shipped() / "recipes"):
        return recipe
    return move_root(recipe, os.path.abspath(source), os.path.abspath(root))


class UsedRecipes:
    """All recipes used by a recipe, directly or indirectly.

    `by_name` has them by the compiler's names, `sources` the digests of their files.
    """

    def __init__(self, root: Path) -> None:
        self.by_name: dict[str, Recipe] = {}
        self.sources: dict[str, Digest] = {}
        self._root = root

    def load(self, recipe: Recipe) -> None:
        """Load all recipes used by `recipe`, recursively. Raises Invalid."""
        problems = []
        for step in recipe.steps.values():
            try:
                self._load_for(recipe, step)
            except (NotFound, OSError) as error:
                problems.append(_unreadable_recipe(recipe, step, error))
        if problems:
            raise Invalid(problems)

    def _load_for(self, recipe: Recipe, step: Step) -> None:
        from ..language import document, parse
        from ..planning.mentions import resolve_recipe

        if step.uses is None:
            return
        full_name = resolve_recipe(recipe, step.uses)
        if full_name in self.by_name:
            return
        name = step.uses.recipe
        if is_path(name):
            path = Path(recipe.document.name).parent / name
        else:
            path = find(name, self._root)
        text = whole(path)
        self.sources[str(path)] = of_bytes(text)
        other = parse.recipe(document.parse(text, str(path)))
        if recipe.home and is_path(name):
            other = place_recipe(other, path, self._root)
        self.by_name[full_name] = other
        self.load(other)


def _unreadable_recipe(recipe: Recipe, step: Step, error: NotFound | OSError) -> Problem:
    assert step.uses is not None
    name = step.uses.recipe
    if isinstance(error, (NotFound, FileNotFoundError)):
        message = f'there is no recipe "{name}"'
    else:
        message = f"cannot read {name}: {error.strerror or error}"
    fix = "use a recipe file or a library recipe"
    if isinstance(error, NotFound):
        fix = error.fix
    return recipe.document.problem("unknown-recipe", message, (*step.origin, "uses"), fix=fix)


# -- inputs --------------------------------------------------------------------------------------


def bind_inputs(
    ws: Workspace, recipe: Recipe, given: Mapping[str, Any], **how: Any
) -> dict[str, Tree]:
    """Bind inputs like `inputs.bind`, and remove credentials from addresses.

    The full addresses are kept in `ws.addresses`. Raises Invalid.
    """
    from ..language import inputs

    values = inputs.bind(recipe, given, **how)
    for name, value in values.items():
        if takes_path(recipe.inputs[name]):
            values[name] = _without_credentials(ws, recipe, name, value)
    return values


def takes_path(spec: Input) -> bool:
    """Return True if the values of an input are paths or addresses."""
    return not _PATH_TYPES.isdisjoint({spec.type, spec.items})


def _without_credentials(ws: Workspace, recipe: Recipe, name: str, value: Tree) -> Tree:
    """Remove the credentials from an address value, and record the full address. Raises Invalid."""
    from ..language import inputs

    if isinstance(value, list):
        return [_without_credentials(ws, recipe, name, item) for item in value]
    if not isinstance(value, str):
        return value
    address, private = inputs.split_secrets(value)
    if not private:
        return value
    if recipe.inputs[name].stream:
        raise Invalid([_streamed_secret(recipe, name)])
    if ws.addresses.setdefault(address, value) != value:
        words = (
            f"two inputs have the URL {address} with different queries;"
            " the query only grants access and does not tell files apart"
        )
        raise Invalid(
            [Problem("two-queries", words, fix="download the files and pass their paths")]
        )
    return address


def _streamed_secret(recipe: Recipe, name: str) -> Problem:
    problem = recipe.document.problem(
        "streamed-secret",
        f'the signed URL of "{name}" would appear in the command, because the input is streamed',
        ("inputs", name),
        fix="set `stream: false` in the recipe",
        key=True,
    )
    return problem._replace(input=name)


def _start_at_root(spec: Input, value: Tree, location: CallerLocation) -> Tree:
    """Resolve a relative path typed in `location` to a workspace path."""
    from ..language.addresses import kind_of

    if isinstance(value, list):
        return [_start_at_root(spec, item, location) for item in value]
    if not isinstance(value, str) or not takes_path(spec):
        return value
    if kind_of(value) != "path" or value[:1] in "/~":
        return value
    path = location.typed(value)
    # A bare model name is a Hub model.
    return f"./{path}" if "model" in (spec.type, spec.items) else path
