"""One classic script out of the page's modules, for the live page and for the report: in a file from disk modules cannot import each other.

A module imports with `import { a, b } from "./x.js";` and exports with `export const`, `export function` or `export class`: nothing else is read.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
LIBRARIES: Final = ("preact.js", "hooks.js", "htm.js", "signals-core.js", "signals.js")
"""What the live page needs beside uPlot, in the order in which it is read."""
CHARTS: Final = "uPlot.iife.min.js"
_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:const|function\*?|class)) (\w+)", re.MULTILINE)
_LEFT: Final = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *(?://.*|/\*\*(?:[^*]|\*(?!/))*\*/)\n", re.MULTILINE)
"""A comment that has its lines to itself: it is for who reads the modules, and is not sent."""
_MAP: Final = re.compile(r"\n?//# sourceMappingURL=\S+\s*$")


@functools.cache
def script(entry: str) -> str:
    """The module `entry` with all that it imports, as a classic script that leaves no global behind."""
    written: dict[str, str] = {}
    _write(entry, written, ())
    return '"use strict";\n(() => {\n' + "".join(written.values()) + "})();\n"


def _write(name: str, written: dict[str, str], above: tuple[str, ...]) -> None:
    """Put a module behind those that it imports.  Raises ValueError for a circle, and for what is not read here."""
    if name in written:
        return
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
    text = _COMMENT.sub("", (HERE / "app" / f"{name}.js").read_text("utf-8"))
    for _, other in _IMPORT.findall(text):
        _write(other, written, (*above, name))
    exported = [found[1] for found in _EXPORT.findall(text)]
    text = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {found[2]}Module;\n", text)
    text = _EXPORT.sub(r"\1 \2", text)
    if left := _LEFT.search(text):
        raise ValueError(f"{name}.js: the bundle does not read `{left[0]}`")
    written[name] = (
        f"// {name}.js\nconst {name}Module = (() => {{\n{text}return {{ {', '.join(exported)} }};\n}})();\n"
    )


@functools.cache
def libraries() -> str:
    """What others wrote, for the live page: scripts that make globals."""
    return "\n".join(library(name) for name in (*LIBRARIES, CHARTS))


def library(name: str) -> str:
    """One script of others, without the address of a source map that is not here."""
    return _MAP.sub("", (HERE / "vendor" / name).read_text("utf-8")) + ";\n"


@functools.cache
def style(*names: str) -> str:
    """Style sheets, one behind the other."""
    return "".join((HERE / name).read_text("utf-8") for name in names)


def licences() -> str:
    """What the licences of all libraries say, for people."""
    parts = json.loads((HERE / "vendor" / "vendor.json").read_text("utf-8"))
    return "\n\n".join(
        f"{part['name']} {part['version']} ({part['license']})\n\n{(HERE / 'vendor' / name).read_text('utf-8')}"
        for part in parts
        for name in part["files"]
        if name.endswith(".LICENSE")
    )
