"""Collect the settings of a step's program from arguments, written files and recipe inputs.

A setting is found by its common name (`save_every`), by a tool's name (`save_steps`), or by its
path in a configuration file (`trainer.model.seq_len`, or the end of the path, `model.seq_len`).
Arguments and files take precedence over recipe inputs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

from ..errors import RecipeError
from ..language.template import TemplateError, evaluate, expressions, has, references
from ..planning.step import StepSpec


class UnknownSetting(Exception):
    """Error for a fact that is unknown before the run. The message says how to find out."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a setting: a recipe input, a command argument or a configuration file."""

    kind: Literal["input", "argument", "file"]
    name: str
    file: str = ""
    found_at: str = ""
    """Path of an existing file; empty if the recipe writes the file."""


class Setting(NamedTuple):
    """One setting of a program. `value` is an `UnknownSetting` if known only at run time."""

    key: str
    value: object
    origin: Origin
    declared: bool = True
    """Whether an input type or a known tool confirms the meaning; otherwise it is a guess by name."""


class ToolSettings(Mapping[str, object]):
    """Settings of a program by name or alias. Declared settings take precedence over guesses.

    An unset setting is null. Reading a setting without a value before the run raises
    UnknownSetting.
    """

    def __init__(self, settings: Iterable[Setting], names: Mapping[str, Sequence[str]]) -> None:
        self._found: dict[str, Setting] = {}
        for each in settings:
            for name in ends(each.key):
                known = self._found.setdefault(name, each)
                is_surer = each.declared and not known.declared
                if is_surer and each.value is not None:
                    self._found[name] = each
        self._names = names

    def setting(self, name: str) -> Setting | None:
        """Return the setting `name`; None if it is unset."""
        guess = None
        for each in (name, *self._names.get(name, ())):
            found = self._found.get(each)
            if found is None or found.value is None:
                continue
            if found.declared:
                return found
            guess = guess or found
        return guess

    def find_origin(self, name: str) -> Origin | None:
        """Return the source of the setting `name`, even if the setting is null."""
        found = self.setting(name)
        if found is not None:
            return found.origin
        for each in (name, *self._names.get(name, ())):
            if each in self._found:
                return self._found[each].origin
        return None

    def find_value(self, value: str) -> Origin | None:
        """Return the source of a setting with this value, inputs first."""
        origins = [each.origin for each in self._found.values() if each.value == value]
        for origin in origins:
            if origin.kind == "input":
                return origin
        return origins[0] if origins else None

    def __getitem__(self, name: str) -> object:
        found = self.setting(name)
        if found is None:
            return None
        if isinstance(found.value, UnknownSetting):
            raise found.value
        return found.value

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._found, *self._names)))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True, slots=True)
class Word:
    """One command-line word and its source in the recipe.

    `text` is None if the word is known only at run time.
    """

    text: str | None
    leaf: object


def words(spec: StepSpec, scope: Mapping[str, Any]) -> list[Word]:
    """Return the known words of a step's command.

    Of a script these are the words of all its commands, one after another.
    """
    if spec.accelerate is not None:
        return _launch_words(spec.accelerate, scope)
    if isinstance(spec.run, list):
        return list(_list_words(spec.run, scope))
    return _script_words(str(spec.run or ""), scope)


def _launch_words(block: Mapping[str, Any], scope: Mapping[str, Any]) -> list[Word]:
    """Return the words of `accelerate launch` for the `accelerate` block of a step."""
    options: list[Any] = []
    if block.get("mixed_precision") is not None:
        options.append(["--mixed_precision", block["mixed_precision"]])
    program = [block.get("module") or block.get("script") or ""]
    if block.get("module"):
        program.insert(0, "-m")
    given = block.get("args")
    arguments: list[Word] = []
    if isinstance(given, Mapping):
        arguments += _argument_words(given, scope)
    elif isinstance(given, list):
        arguments += _list_words(given, scope)
    return [
        Word("accelerate", "accelerate"),
        Word("launch", "launch"),
        *_list_words(options, scope),
        *_list_words(program, scope),
        *arguments,
    ]


def of_words(line: Sequence[Word]) -> Iterator[Setting]:
    """Yield the settings in a command line.

    Options are `--name value`, `--name=value`, `--name a b` and `--flag`. Words such as
    `name=value` count too.
    """
    n = 0
    while n < len(line):
        word = line[n]
        n += 1
        if word.text is None or word.text == "--":
            continue
        name, equals, value = word.text.partition("=")
        is_option = name.startswith("--")
        is_setting = is_option or _NAME.fullmatch(name)
        if equals and is_setting:
            origin = _origin(word.leaf, Origin("argument", name))
            yield Setting(_key(name), scalar(value), origin)
        elif is_option and not equals:
            values = _values_of_option(islice(line, n, None))
            n += len(values)
            yield from _settings_of_option(name, word, values)


def _values_of_option(words: Iterable[Word]) -> list[Word]:
    """Return the words up to the next option, or up to a script that follows a value."""
    values: list[Word] = []
    for word in words:
        text = word.text or ""
        if _OPTION.match(text):
            break
        if values and text.endswith((".py", ".sh")):
            break
        values.append(word)
    return values


def _settings_of_option(name: str, flag: Word, values: Sequence[Word]) -> Iterator[Setting]:
    """Yield the settings of `--name a b`; a mapping in JSON gives its parts, too."""
    key, origin = _key(name), Origin("argument", name)
    if not values:
        yield Setting(key, True, _origin(flag.leaf, origin))
    elif any(_is_place(word.leaf) for word in values):
        return  # a path of this run, not a setting
    elif any(word.text is None for word in values):
        unknown = UnknownSetting(f"the value of {name}, known only to the running step")
        yield Setting(key, unknown, origin)
    else:
        given = [scalar(str(word.text)) for word in values]
        where = _origin(values[0].leaf, origin)
        value = given[0] if len(given) == 1 else given
        yield Setting(key, value, where)
        if isinstance(given[0], Mapping):
            for part in of_tree(given[0], scope={}, file="", at=key):
                yield part._replace(origin=where)


def of_tree(
    tree: object, scope: Mapping[str, Any], file: str, found_at: str = "", at: str = ""
) -> Iterator[Setting]:
    """Yield the leaf settings of a configuration by their paths.

    Of a list of mappings the first counts. A mapping is yielded too, to say that it is there.
    """
    origin = Origin("file", at, file, found_at)
    if isinstance(tree, Mapping):
        if at:
            yield Setting(at, dict.fromkeys(map(str, tree)) or {}, origin)
        for key, item in tree.items():
            name = _key(str(key))
            path = f"{at}.{name}" if at else name
            yield from of_tree(item, scope, file, found_at, path)
    elif isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        yield from of_tree(tree[0], scope, file, found_at, at)
    elif at and not _is_place(tree):
        value = _leaf_value(tree, scope, f"{at} in {file}")
        if isinstance(value, Mapping):
            yield from of_tree(value, scope, file, found_at, at)
        else:
            yield Setting(at, value, _origin(tree, origin))


def _leaf_value(leaf: object, scope: Mapping[str, Any], what: str) -> object:
    """Return the value of a configuration leaf, or an `UnknownSetting` if known only at run time."""
    if not isinstance(leaf, str) or not has(leaf):
        return leaf
    try:
        return evaluate(leaf, scope)
    except (TemplateError, RecursionError):
        return UnknownSetting(f"the value of {what}, known only to the running step")


def of_inputs(inputs: Mapping[str, object]) -> Iterator[Setting]:
    """Yield the recipe's inputs as settings, including the keys of mappings."""
    for name, value in inputs.items():
        yield Setting(name, value, Origin("input", name))
        if isinstance(value, Mapping):
            inner = (*of_tree(value, {}, name), *of_tree(value, {}, name, at=name))
            for each in inner:
                yield each._replace(origin=Origin("input", name))


def scalar(text: str) -> object:
    """Convert a command-line word to its most likely typed value."""
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    if low in ("none", "null"):
        return None
    if _NUMBER.fullmatch(text) and len(text) < 30:
        number = float(text)
        is_whole = number.is_integer() and "e" not in low and "." not in text
        return int(number) if is_whole else number
    if text[:1] in "[{":
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*")
_OPTION: Final = re.compile(r"--?[A-Za-z]|--$|&&|\|\|?$|;$|>")
_NUMBER: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_MARK: Final = re.compile("\x01(\\d+)\x02")


def _key(name: str) -> str:
    return name.lstrip("-+").replace("-", "_").lower()


def ends(key: str) -> Iterator[str]:
    """Yield a dotted key and its suffixes: `a.b.c`, `b.c`, `c`."""
    while key:
        yield key
        key = key.partition(".")[2]


def _origin(leaf: object, otherwise: Origin) -> Origin:
    """Return the input that a template reads as the origin, or else `otherwise`."""
    if isinstance(leaf, str) and has(leaf):
        read = references(leaf)
        path = read[0].path if len(read) == 1 else ()
        if len(path) == 2 and path[0] == "inputs":
            return Origin("input", path[1])
    return otherwise


def _is_place(leaf: object) -> bool:
    """Return True if a template reads a path of this run."""
    if not isinstance(leaf, str) or not has(leaf):
        return False
    try:
        return any(each.path[0] in ("steps", "outputs", "state") for each in references(leaf))
    except TemplateError:
        return False


def _list_words(items: Sequence[Any], scope: Mapping[str, Any]) -> Iterator[Word]:
    """Yield the words of a command list as `template.argv` renders them.

    A word that cannot be rendered before the run has no text.
    """
    for item in items:
        if isinstance(item, list):
            inner = list(_list_words(item, scope))
            leaves = [each for each in item if not isinstance(each, list)]
            # One null leaves out the whole list.
            if not any(_is_null(leaf, scope) for leaf in leaves):
                yield from inner
        elif not _is_null(item, scope):
            yield from _leaf_words(item, scope)


def _is_null(leaf: object, scope: Mapping[str, Any]) -> bool:
    if leaf is None:
        return True
    if not isinstance(leaf, str) or not has(leaf):
        return False
    try:
        return evaluate(leaf, scope) is None
    except TemplateError:
        return False


def _leaf_words(leaf: object, scope: Mapping[str, Any]) -> Iterator[Word]:
    try:
        value = evaluate(leaf, scope) if isinstance(leaf, str) else leaf
    except TemplateError:
        yield Word(None, leaf)
        return
    values = value if isinstance(value, (list, tuple)) else [value]
    for each in values:
        yield Word(_text(each), leaf)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _argument_words(given: Mapping[str, Any], scope: Mapping[str, Any]) -> Iterator[Word]:
    """Yield the words of an `args` mapping: true becomes a flag, false and null are dropped."""
    for name, leaf in given.items():
        try:
            value = evaluate(leaf, scope) if isinstance(leaf, str) else leaf
        except TemplateError:
            yield Word(f"--{name}", f"--{name}")
            yield Word(None, leaf)
            continue
        if value is True:
            yield Word(f"--{name}", leaf)
        elif value is not None and value is not False:
            yield Word(f"--{name}", f"--{name}")
            values = value if isinstance(value, list) else [value]
            for each in values:
                yield Word(_text(each), leaf)


def _script_words(text: str, scope: Mapping[str, Any]) -> list[Word]:
    """Return the words of a shell script, without following variables, expansions or branches."""
    try:
        found = expressions(text)
    except RecipeError:
        return []
    parts: list[str] = []
    leaves: list[str] = []
    end = 0
    for expression in found:
        parts += [text[end : expression.offset], f"\x01{len(leaves)}\x02"]
        leaves.append(text[expression.offset : expression.offset + expression.length])
        end = expression.offset + expression.length
    marked = "".join((*parts, text[end:])).replace("\\\n", " ")
    line: list[Word] = []
    for row in marked.splitlines():
        try:
            split = shlex.split(row, comments=True)
        except ValueError:
            continue
        for word in split:
            if whole := _MARK.fullmatch(word):
                line += _leaf_words(leaves[int(whole[1])], scope)
            else:
                line.append(Word(_fill_word(word, leaves, scope), word))
        line.append(Word("--", "--"))
    return line


def _fill_word(word: str, leaves: Sequence[str], scope: Mapping[str, Any]) -> str | None:
    try:
        return _MARK.sub(lambda mark: _text(evaluate(leaves[int(mark[1])], scope)), word)
    except TemplateError:
        return None
