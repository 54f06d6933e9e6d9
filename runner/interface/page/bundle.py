"""Bundle JavaScript modules into one classic script, for the live page and the HTML report.

The report is opened from disk, and there browsers do not let modules import each other. Only
`import { a, b } from "./x.js";` and `export` of a const, function or class are supported.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
LIBRARIES: Final = ("preact.js", "hooks.js", "htm.js", "signals-core.js", "signals.js")
"""Libraries of the live page except uPlot, in load order."""
CHARTS: Final = "uPlot.iife.min.js"
_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([a-z]+)\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ((?:async )?(?:const|function\*?|class)) (\w+)", re.MULTILINE)
_LEFT: Final = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)
_COMMENT: Final = re.compile(r"^ *(?://.*|/\*\*(?:[^*]|\*(?!/))*\*/)\n", re.MULTILINE)
"""A comment on lines of its own, which the bundle leaves out."""
_MAP: Final = re.compile(r"\n?//# sourceMappingURL=\S+\s*$")


@functools.cache
def script(entry: str) -> str:
    """Return the module `entry` and its imports as a classic script without global variables."""
    written: dict[str, str] = {}
    _write(entry, written, ())
    return '"use strict";\n(() => {\n' + "".join(written.values()) + "})();\n"


def _write(name: str, written: dict[str, str], above: tuple[str, ...]) -> None:
    """Add a module to `written`, after the modules that it imports.

    Raises ValueError for circular imports and for unsupported import or export statements.
    """
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
    names = ", ".join(exported)
    written[name] = (
        f"// {name}.js\nconst {name}Module = (() => {{\n{text}return {{ {names} }};\n}})();\n"
    )


@functools.cache
def libraries() -> str:
    """Return the third-party scripts of the live page, which define global variables."""
    return "\n".join(library(name) for name in (*LIBRARIES, CHARTS))


def library(name: str) -> str:
    """Return a third-party script without its source map URL, since the map is not included."""
    return _MAP.sub("", (HERE / "vendor" / name).read_text("utf-8")) + ";\n"


@functools.cache
def style(*names: str) -> str:
    """Return the concatenation of style sheets."""
    return "".join((HERE / name).read_text("utf-8") for name in names)


def licences() -> str:
    """Return the license texts of all third-party libraries."""
    vendor = HERE / "vendor"
    texts = []
    for part in json.loads((vendor / "vendor.json").read_text("utf-8")):
        title = f"{part['name']} {part['version']} ({part['license']})"
        for name in part["files"]:
            if name.endswith(".LICENSE"):
                text = (vendor / name).read_text("utf-8")
                texts.append(f"{title}\n\n{text}")
    return "\n\n".join(texts)
