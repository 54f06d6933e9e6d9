"""Write and read YAML that versions 1.1 and 1.2 parse alike.

Texts such as `1e-5`, `0o17` and `yes` are quoted, because one of the versions reads them as another
type. Numbers are written in a form common to both.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from .yaml_scalars import REFUSED_CHARACTERS, plain_value

if TYPE_CHECKING:
    import yaml

_ESCAPED = re.compile(f"{REFUSED_CHARACTERS.pattern[:-1]}\ufeff]")


def block(value: object, *, indented: bool = False, width: int = 80) -> str:
    """Return a value as lines of YAML.

    `indented`: lists are deeper than their keys, short lists are on one line, and multi-line texts
    are blocks.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, indentless and not indented)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = None
        if _ESCAPED.search(value) or not _is_text(value):
            style = '"'
        elif indented and "\n" in value:
            style = "|"
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_multi_representer(str, text)
    Dumper.add_representer(str, text)
    flow = None if indented else False
    return yaml.dump(
        value,
        Dumper=Dumper,
        sort_keys=False,
        width=width,
        default_flow_style=flow,
        allow_unicode=True,
    )


def flow(value: object) -> str:
    """Return a value on one line, as JSON that is also YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return _ESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    text = json.dumps(value)
    if isinstance(value, float) and "." not in text:
        # YAML 1.1 knows a number with an exponent by its point.
        return text.replace("e", ".0e")
    return text


def scalar(value: object) -> str:
    """Return a value on one line; text is unquoted if every version reads it as the same text."""
    if not isinstance(value, str):
        return flow(value)
    if not value or "\n" in value:
        return flow(value)
    if _ESCAPED.search(value):
        return flow(value)
    plain = block(value, width=len(value) * 12 + 80).removesuffix("\n...\n").removesuffix("\n")
    return plain if plain == value else flow(value)


def load(text: str) -> Any:
    """Return the value of a YAML 1.2 file of another tool.  Raises yaml.YAMLError.

    Allows tags and merge keys. Numbers outside the limits of recipes become text.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def core(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> object:
        if node.style is not None:
            return node.value
        try:
            return plain_value(node.value)
        except ValueError:
            return node.value

    Loader.yaml_implicit_resolvers = {"<": [("tag:yaml.org,2002:merge", re.compile("<<"))]}
    Loader.add_constructor("tag:yaml.org,2002:str", core)
    return yaml.load(text, Loader)  # noqa: S506  it is a safe one


def _is_text(text: str) -> bool:
    try:
        return isinstance(plain_value(text), str)
    except ValueError:
        return False  # a number that we refuse
