"""Convert step ids between the stored form, `t[file=a%2Fb]`, and the readable form, `t[file=a/b]`.

A stored id is one word of printable ASCII, for the store, events and file names.  The readable form
keeps commas, equals signs, brackets, percent signs and spaces in values escaped, so that both forms
can be converted into each other.  A mapping is shown by names, as in
`t[model.name=rf,model.depth=3]`, and may be typed in any order, or as JSON.  A long value ends in
`~` and twelve hex digits, which are enough to type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, unquote

_INSTANCE: Final = re.compile(r"(?<=\w)\[\w+=[^][\s]*\]")
_TYPED: Final = re.compile(r"(?<=\w)\[(?=[\w.-]+=)")
_AXIS: Final = re.compile(r"([\w.-]+)=")
_CUT: Final = re.compile(r"=[^,\]=]*(~[0-9a-f]{12})(?=[],])")
_CUT_TREE: Final = re.compile(r"=%(?:7B|5B)[^,\]=]*(~[0-9a-f]{12})(?=[],])")
_MAPPING: Final = re.compile(r"(\w+)=(%7B[^,\]=]*%7D)(?=[],])")
LONGEST: Final = 80
"""Maximum length of an axis value in an id before it is shortened, in characters."""
_ESCAPES: Final = re.compile(r"(?:%[0-9A-F]{2})+")
_KEPT: Final = frozenset(",=[]% ")


def readable(text: str) -> str:
    """Replace all percent-encoded step ids in `text` with their readable form."""
    if "%" not in text:
        return text
    return _INSTANCE.sub(_read_instance, text)


def _read_instance(instance: re.Match[str]) -> str:
    """Return the bracketed axis values of an id in readable form."""
    whole = _CUT_TREE.sub(r"=\1", _MAPPING.sub(_by_name, instance[0]))
    return _ESCAPES.sub(_unescape, whole)


def _by_name(axis: re.Match[str]) -> str:
    """Return an axis whose value is a mapping as `axis.key=value` pairs.

    Return it unchanged if this form is ambiguous.
    """
    try:
        tree = json.loads(unquote(axis[2], errors="strict"))
    except ValueError:
        return axis[0]
    parts = ",".join(_leaves(axis[1], tree))
    is_unique = _typed_axes(f"{parts}]", 0) == (axis[0], len(parts) + 1)
    return parts if is_unique else axis[0]


def _leaves(name: str, tree: Any) -> Iterator[str]:
    """Yield `NAME=VALUE` for each value of a nested mapping, with dotted names."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(f"{name}.{key}", value)
    else:
        is_plain = isinstance(tree, str) and _scalar(tree) == tree
        text = tree if is_plain else json.dumps(tree, sort_keys=True)
        yield f"{name}={quote(text, safe='')}"


def _scalar(text: str) -> Any:
    """Parse a typed value as JSON, or return it as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tree(parts: str) -> dict[str, Any]:
    """Build nested mappings from `a.b=value` pairs, by axis."""
    found: dict[str, Any] = {}
    for part in parts.split(","):
        path, _, value = part.partition("=")
        *above, last = path.split(".")
        inner = found
        for name in above:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                return {}
        inner[last] = _scalar(unquote(value))
    return found


def encode_value(value: object) -> str:
    """Return an axis value percent-encoded for a step id.

    Long values are cut and end in a hash.
    """
    if type(value) is int:
        return str(value)

    from ..digest import of_value
    from ..language.template import text_of

    plain = _plain(value)
    if isinstance(plain, (str, int, float, bool)):
        text = quote(text_of(plain), safe="")
    else:
        text = quote(json.dumps(plain, sort_keys=True), safe="")
    if len(text) <= LONGEST:
        return text
    return f"{text[:64]}~{of_value('axis', plain)[:12]}"


def _plain(value: object) -> object:
    """Convert a value to plain JSON data."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def bare(id: str) -> str:
    """Return a step id without its axis values: `s/train` for `s[rank=4]/train`."""
    return re.sub(r"\[[^]]*\]", "", id)


def names(id: str) -> set[str]:
    """Return every name that refers to a step instance, alone or in a group.

    For `s[rank=4]/train[lr=1]`, these are `s`, `s/train`, `s[rank=4]`, `s[rank=4]/train` and the
    id.  Shortened values may be given by their hashes: all of them, or those that `readable` shows
    as a hash.
    """
    step = bare(id)
    found = {id, step}
    if "~" in id:
        found.update(form.sub(r"=\1", id) for form in (_CUT, _CUT_TREE))
    for whole in (id, step):
        found.update(whole[: at.start()] for at in re.finditer(r"[\[/]", whole))
    return found


def inner_names(id: str) -> set[str]:
    """Return the names of a step inside its used recipe, such as `train` for `lm[lr=1]/train`."""
    parts = id.split("/")
    found: set[str] = set()
    for n in range(1, len(parts)):
        found |= names("/".join(parts[n:]))
    return found


def stored_form(word: str) -> str:
    """Convert a step id, readable or percent-encoded, to its percent-encoded form."""
    done = ""
    while start := _TYPED.search(word):
        found = _typed_axes(word, start.end())
        if found is None:
            break
        axes, end = found
        done += word[: start.start()] + f"[{quote(axes, safe='%,=~')}]"
        word = word[end:]
    return done + word


def _typed_axes(word: str, at: int) -> tuple[str, int] | None:
    """Parse the axis values of an id from position `at` up to the closing bracket.

    Return them in stored form and the position after the bracket, or None if there is no closing
    bracket.
    """
    axes: dict[str, str] = {}
    dotted: list[str] = []
    while name := _AXIS.match(word, at):
        value, at = _typed_value(word, name.end())
        head = name[1].partition(".")[0]
        if head != name[1]:
            dotted.append(f"{name[1]}={value}")
        axes.setdefault(head, value)
        if word[at : at + 1] == "]":
            trees = _tree(",".join(dotted)) if dotted else {}
            for axis in axes.keys() & trees.keys():
                axes[axis] = encode_value(trees[axis])
            return ",".join(f"{axis}={text}" for axis, text in axes.items()), at + 1
        if word[at : at + 1] != ",":
            return None
        at += 1
    return None


def _typed_value(word: str, at: int) -> tuple[str, int]:
    """Return an axis value from position `at`, and the position after it.

    A JSON mapping or list is one value.
    """
    if word[at : at + 1] in ("{", "["):
        try:
            tree, end = json.JSONDecoder().raw_decode(word, at)
        except ValueError:
            tree, end = None, at
        if end > at and word[end : end + 1] in (",", "]"):
            return encode_value(tree), end
    end = at
    while end < len(word) and word[end] not in ",]":
        end += 1
    return word[at:end], end


def _unescape(found: re.Match[str]) -> str:
    try:
        text = unquote(found[0], errors="strict")
    except UnicodeDecodeError:  # a long value was cut here
        return found[0]
    return "".join(map(_show_char, text))


def _show_char(char: str) -> str:
    """Return a character of a value, or its escape if the character has a meaning in an id."""
    if char.isprintable() and char not in _KEPT:
        return char
    return quote(char, safe="")
