"""Find a training script's command-line options in its syntax tree, without running the script.

Reads options of HfArgumentParser, tyro, click, typer, fire and LightningCLI.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

_SCALARS: Final = frozenset({"int", "float", "bool", "str", "Path"})
_TRAINING_ARGUMENTS: Final = frozenset(
    {"TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "RewardConfig"}
)
"""Argument classes of transformers and trl, all with an `output_dir`."""
_CLICK_TYPES: Final = {
    "INT": "int",
    "FLOAT": "float",
    "BOOL": "bool",
    "STRING": "str",
    "Path": "Path",
    "File": "Path",
}


class DeclaredOption(NamedTuple):
    """A declared option. `flag` is empty for a positional argument."""

    name: str
    flag: str
    type: str  # int, float, bool, str or Path
    default: ast.expr | None  # None: no default
    help: str
    required: bool
    choices: tuple[str, ...] = ()
    many: bool = False
    negative: str = ""  # the flag that turns a boolean off, such as --no-shuffle
    alone: bool = False  # the flag takes no value


def find_declared(tree: ast.Module, notes: list[str]) -> list[DeclaredOption]:
    """Return the options that a script declares.

    Append to `notes` the options that the script's syntax does not show.
    """
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: list[DeclaredOption] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += _options_of_call(node, classes, functions, notes)
    for function in functions.values():
        found += _options_of_decorators(function, notes)
    return found


def _options_of_call(
    call: ast.Call,
    classes: Mapping[str, ast.ClassDef],
    functions: Mapping[str, ast.FunctionDef],
    notes: list[str],
) -> Iterator[DeclaredOption]:
    """Yield the options declared by a call of HfArgumentParser, tyro, typer, fire or LightningCLI."""
    word, owner = _word(call.func), _owner(call.func)
    first = call.args[0] if call.args else None
    name = _word(first)
    if word == "HfArgumentParser" and first is not None:
        for each in first.elts if isinstance(first, (ast.Tuple, ast.List)) else [first]:
            yield from fields(_word(each), classes, notes, dashes=False)
    elif word == "cli" and owner == "tyro" and first is not None:
        if name in functions:
            yield from _parameters(functions[name], "tyro", notes)
        else:
            yield from fields(name, classes, notes, dashes=True)
    elif word == "run" and owner == "typer" and name in functions:
        yield from _parameters(functions[name], "typer", notes)
    elif word == "Fire" and owner in ("fire", ""):
        if name in functions:
            yield from _parameters(functions[name], "fire", notes)
        else:
            notes.append(
                "fire makes commands of what the script has: put one behind the script in `run`, and its options as --NAME=VALUE"
            )
    elif word == "LightningCLI":
        yield from _options_of_lightning(call, classes, notes)


def _options_of_decorators(function: ast.FunctionDef, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the options declared by the typer or click decorators of a function."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    if _is_typer_command(calls):
        yield from _parameters(function, "typer", notes)
    for call in calls:
        if _word(call.func) in ("option", "argument") and _owner(call.func) in ("click", ""):
            yield from _options_of_click(call, notes)


def _is_typer_command(decorators: Sequence[ast.Call]) -> bool:
    names = {_word(each.func) for each in decorators}
    if "command" not in names or names & {"option", "argument"}:
        return False
    return any(_owner(each.func) != "click" for each in decorators)


# -- dataclasses ------------------------------------------------------------------------------------------------------------------------------------


def fields(
    name: str, classes: Mapping[str, ast.ClassDef], notes: list[str], *, dashes: bool
) -> Iterator[DeclaredOption]:
    """Yield the options of a dataclass, after the options of its base classes."""
    found = classes.get(name)
    if found is None and name in _TRAINING_ARGUMENTS:
        yield DeclaredOption("output_dir", "--output_dir", "str", None, "", required=True)
        notes.append(
            f"of the options of {name} only --output_dir is here: add those that you set, such as --num_train_epochs"
        )
        return
    if found is None:
        notes.append(f"the options of {name} are declared elsewhere: add those that you set")
        return
    for base in found.bases:
        yield from fields(_word(base), classes, notes, dashes=dashes)
    for node in found.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        kind, many, choices = _parse_annotation(node.annotation)
        if not kind:
            notes.append(
                f"line {node.lineno}: {node.target.id} is left to its default: it is no single value"
            )
            continue
        default, words = _field(node.value)
        flag = f"--{node.target.id.replace('_', '-') if dashes else node.target.id}"
        negative = (
            f"--no-{flag[2:]}"
            if dashes and kind == "bool"
            else f"--no_{flag[2:]}"
            if kind == "bool" and _is(default, True)
            else ""
        )
        required = default is None and not (
            isinstance(node.value, ast.Call) and _argument(node.value, "default_factory")
        )
        yield DeclaredOption(
            node.target.id,
            flag,
            kind,
            default,
            words,
            required,
            choices,
            many,
            negative,
            kind == "bool" and not required,
        )


def _field(value: ast.expr | None) -> tuple[ast.expr | None, str]:
    """Return the default and the help text of a dataclass field."""
    if not isinstance(value, ast.Call) or _word(value.func) not in ("field", "arg", "HfArg"):
        return value, ""
    metadata = _argument(value, "metadata")
    pairs = (
        zip(metadata.keys, metadata.values, strict=True) if isinstance(metadata, ast.Dict) else ()
    )
    words = next(
        (text_of(each) for key, each in pairs if text_of(key) == "help"),
        text_of(_argument(value, "help")),
    )
    return _argument(value, "default"), words


# -- functions --------------------------------------------------------------------------------------------------------------------------------------


def _parameters(function: ast.FunctionDef, tool: str, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the options that typer, tyro or fire derives from a function's parameters."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [
        *[None] * (len(plain) - len(arguments.defaults)),
        *arguments.defaults,
    ]
    for argument, default in [
        *zip(plain, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        annotation, about = argument.annotation, None
        if (
            isinstance(annotation, ast.Subscript)
            and _word(annotation.value) == "Annotated"
            and isinstance(annotation.slice, ast.Tuple)
        ):
            annotation, *more = annotation.slice.elts
            about = next((each for each in more if isinstance(each, ast.Call)), None)
        if isinstance(default, ast.Call) and _word(default.func) in ("Option", "Argument"):
            about, default = (
                default,
                _argument(default, "default") or (default.args[0] if default.args else None),
            )
        kind, many, choices = _parse_annotation(annotation)
        if not kind:
            continue
        if isinstance(default, ast.Constant) and default.value is ...:
            default = None
        if tool == "fire":
            kind = _of_value(default) if annotation is None and default is not None else kind
            kind = kind if kind in _SCALARS else "str"
            flag = f"--{argument.arg}="
            yield DeclaredOption(argument.arg, flag, kind, default, "", default is None, choices)
            continue
        named = next(
            (
                text
                for each in (about.args if about else ())
                if (text := text_of(each)).startswith("--")
            ),
            "",
        )
        positional = tool == "typer" and (
            default is None if about is None else _word(about.func) == "Argument"
        )
        flag = (
            "" if positional else named.partition("/")[0] or f"--{argument.arg.replace('_', '-')}"
        )
        if tool == "typer" and many and flag:
            notes.append(_note_repeated(argument.lineno, flag))
            continue
        negative = (
            (named.partition("/")[2] or f"--no-{flag[2:]}") if kind == "bool" and flag else ""
        )
        words = text_of(_argument(about, "help")) if about else ""
        yield DeclaredOption(
            argument.arg,
            flag,
            kind,
            default,
            words,
            default is None,
            choices,
            many,
            negative,
            bool(negative),
        )


def _options_of_lightning(
    call: ast.Call, classes: Mapping[str, ast.ClassDef], notes: list[str]
) -> Iterator[DeclaredOption]:
    """Yield LightningCLI's options for its model and data classes, with two required trainer options first."""
    named = {"model": _argument(call, "model_class"), "data": _argument(call, "datamodule_class")}
    named |= dict(zip(named, call.args, strict=False))
    yield DeclaredOption(
        "output_dir", "--trainer.default_root_dir=", "str", None, "", required=True
    )
    yield DeclaredOption("max_epochs", "--trainer.max_epochs=", "int", None, "", required=True)
    for section, given in named.items():
        if (name := _word(given)) == "":
            continue
        made = next(
            (
                node
                for node in (classes[name].body if name in classes else ())
                if isinstance(node, ast.FunctionDef) and node.name == "__init__"
            ),
            None,
        )
        if made is None:
            notes.append(
                f"the options of {name} are declared elsewhere: add those that you set as --{section}.NAME=VALUE"
            )
            continue
        plain = [argument.arg for argument in made.args.args[1:]]
        for each in _parameters(made, "fire", []):
            if each.name in plain or each.name in {a.arg for a in made.args.kwonlyargs}:
                yield each._replace(name=f"{section}_{each.name}", flag=f"--{section}.{each.name}=")
    notes.append(
        "the options of Lightning's Trainer are those of its defaults: add those that you set as --trainer.NAME=VALUE"
    )


def _options_of_click(call: ast.Call, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the option that a click decorator declares."""
    names = [text for each in call.args if (text := text_of(each))]
    if not names:
        return
    long = next((each for each in names if each.startswith("--")), names[0])
    yes, _, no = long.partition("/")
    own = next(
        (each for each in names if each.isidentifier()), yes.strip().lstrip("-").replace("-", "_")
    )
    default, kind, choices = _argument(call, "default"), _argument(call, "type"), tuple[str, ...]()
    alone = bool(no) or _is(_argument(call, "is_flag"), True)
    word = _CLICK_TYPES.get(_word(kind), _word(kind)) if kind is not None else _of_value(default)
    if isinstance(kind, ast.Call) and _word(kind.func) == "Choice" and kind.args:
        choices = tuple(text_of(each) for each in getattr(kind.args[0], "elts", ()))
    elif isinstance(kind, ast.Call):
        word = _CLICK_TYPES.get(
            _word(kind.func),
            {"IntRange": "int", "FloatRange": "float"}.get(_word(kind.func), "str"),
        )
    if _is(_argument(call, "multiple"), True):
        notes.append(_note_repeated(call.lineno, yes.strip()))
        return
    many = _argument(call, "nargs") is not None and not _is(_argument(call, "nargs"), 1)
    positional = _word(call.func) == "argument"
    required = _is(_argument(call, "required"), True) or (
        positional and default is None and not _is(_argument(call, "required"), False)
    )
    flag = "" if positional else yes.strip()
    yield DeclaredOption(
        own,
        flag,
        "bool" if alone else word if word in _SCALARS else "str",
        default,
        text_of(_argument(call, "help")),
        required,
        choices,
        many,
        no.strip(),
        alone,
    )


def _note_repeated(line: int, flag: str) -> str:
    return f"line {line}: {flag} is left to its default: it is written once for each value, so add as many as you need to `run`"


# -- words ------------------------------------------------------------------------------------------------------------------------------------------


def _parse_annotation(node: ast.expr | None) -> tuple[str, bool, tuple[str, ...]]:
    """Return an annotation's type, whether the option takes several values, and the choices of a Literal.

    The type is empty if no command-line word can express the annotation. A missing annotation counts as str.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if node is None:
        return "str", False, ()
    if isinstance(node, ast.BinOp):  # int | None
        return _parse_annotation(node.left if not _is(node.left, None) else node.right)
    if isinstance(node, ast.Subscript):
        return _parse_subscript(node)
    word = _word(node)
    return word if word in _SCALARS else "", False, ()


def _parse_subscript(node: ast.Subscript) -> tuple[str, bool, tuple[str, ...]]:
    """Return the same values as `_parse_annotation` for Optional, Union, Literal and lists."""
    word, inside = _word(node.value), node.slice
    parts = list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]
    if word in ("Optional", "Union"):
        return _parse_annotation(next((each for each in parts if not _is(each, None)), None))
    if word == "Literal":
        choices = tuple(str(each.value) for each in parts if isinstance(each, ast.Constant))
        return "str", False, choices
    if word in ("list", "List", "Sequence"):
        return _parse_annotation(parts[0])[0], True, ()
    return "", False, ()


def _of_value(node: ast.expr | None) -> str:
    return (
        type(node.value).__name__
        if isinstance(node, ast.Constant) and node.value is not None
        else "str"
    )


def _argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is(node: ast.expr | None, value: object) -> bool:
    if (
        isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
    ):
        return isinstance(node.operand.value, int) and -node.operand.value == value
    return isinstance(node, ast.Constant) and node.value is value


def _word(node: ast.AST | None) -> str:
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )


def _owner(node: ast.AST) -> str:
    return _word(node.value) if isinstance(node, ast.Attribute) else ""


def text_of(node: ast.AST | None) -> str:
    """Return a text literal, or the concatenation of literals joined by `+`; otherwise empty."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""
