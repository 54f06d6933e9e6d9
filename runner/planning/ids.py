"""The id of a matrix instance as it is stored, `tokenize[file=a%2Fb]`, and as people read and type it, `tokenize[file=a/b]`.

An id is one word of printable ASCII in the store, in events and in names of files.  Commas, equals signs, brackets, percent signs and spaces inside a
value stay escaped for people, too, so that the two forms differ and can be changed into each other.
"""

from __future__ import annotations

import re
from typing import Final

_INSTANCE: Final = re.compile(r"(?<=\w)\[\w+=[^][\s]*\]")
_ESCAPES: Final = re.compile(r"(?:%[0-9A-F]{2})+")
_KEPT: Final = frozenset(",=[]% ")


def readable(text: str) -> str:
    """`text` with every stored id in it as people read it."""
    return _INSTANCE.sub(lambda id: _ESCAPES.sub(_unescaped, id[0]), text) if "%" in text else text


def bare(id: str) -> str:
    """An id as its step is written: `s[rank=4]/train` is of `s/train`."""
    return re.sub(r"\[[^]]*\]", "", id)


def names(id: str) -> set[str]:
    """Every word that means a step, alone or with others: `s[rank=4]/train[lr=1]` is one of `s`, `s/train`, `s[rank=4]` and `s[rank=4]/train`."""
    return {
        id,
        *(whole[: at.start()] for whole in (id, bare(id)) for at in re.finditer(r"[\[/]", whole)),
        bare(id),
    }


def inner_names(id: str) -> set[str]:
    """Every word that means a step inside the recipe that it comes from: `lm[lr=1]/train` is `train` of `lm`."""
    parts = id.split("/")
    return {name for n in range(1, len(parts)) for name in names("/".join(parts[n:]))}


def stored(word: str) -> str:
    """The stored form of an id, given in either form."""
    if "[" not in word:
        return word
    from urllib.parse import quote

    return _INSTANCE.sub(lambda id: f"[{quote(id[0][1:-1], safe='%,=')}]", word)


def _unescaped(found: re.Match[str]) -> str:
    from urllib.parse import quote, unquote

    try:
        text = unquote(found[0], errors="strict")
    except UnicodeDecodeError:  # a long value was cut here
        return found[0]
    return "".join(
        char if char.isprintable() and char not in _KEPT else quote(char, safe="") for char in text
    )
