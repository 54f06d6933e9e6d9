"""Find a training script's command-line options in its syntax tree, without running the script.

Reads options of HfArgumentParser, tyro, click, typer, fire and LightningCLI.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .script_syntax import calls_in, classes_in, name_of, text_of

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
_CLICK_RANGES: Final = {"IntRange": "int", "FloatRange": "float"}
"""Types of calls such as `click.IntRange(1, 8)`."""


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
    classes = classes_in(tree)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    found: list[DeclaredOption] = []
    for call in calls_in(tree):
        found += _options_of_call(call, classes, functions, notes)
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
    called = (_owner(call.func), name_of(call.func))
    owner, word = called
    first = call.args[0] if call.args else None
    name = name_of(first)
    if word == "HfArgumentParser" and first is not None:
        yield from _options_of_transformers(first, classes, notes)
    elif called == ("tyro", "cli") and name in functions:
        yield from _parameters(functions[name], "tyro", notes)
    elif called == ("tyro", "cli") and first is not None:
        yield from fields(name, classes, notes, dashes=True)
    elif called == ("typer", "run") and name in functions:
        yield from _parameters(functions[name], "typer", notes)
    elif word == "Fire" and owner in ("fire", ""):
        yield from _options_of_fire(name, functions, notes)
    elif word == "LightningCLI":
        yield from _options_of_lightning(call, classes, notes)


def _options_of_transformers(
    argument: ast.expr, classes: Mapping[str, ast.ClassDef], notes: list[str]
) -> Iterator[DeclaredOption]:
    """Yield the options of a dataclass, or of several, passed to HfArgumentParser."""
    dataclasses = [argument]
    if isinstance(argument, (ast.Tuple, ast.List)):
        dataclasses = argument.elts
    for each in dataclasses:
        yield from fields(name_of(each), classes, notes, dashes=False)


def _options_of_fire(
    name: str, functions: Mapping[str, ast.FunctionDef], notes: list[str]
) -> Iterator[DeclaredOption]:
    """Yield the options of a function; note that the functions become commands otherwise."""
    if name in functions:
        yield from _parameters(functions[name], "fire", notes)
    else:
        notes.append(
            "fire turns functions of the script into commands: write a command after the script in `run`, and its options as --NAME=VALUE"
        )


def _options_of_decorators(function: ast.FunctionDef, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the options declared by the typer or click decorators of a function."""
    calls = [each for each in function.decorator_list if isinstance(each, ast.Call)]
    if _is_typer_command(calls):
        yield from _parameters(function, "typer", notes)
    for call in calls:
        if name_of(call.func) in ("option", "argument") and _owner(call.func) in ("click", ""):
            yield from _options_of_click(call, notes)


def _is_typer_command(decorators: Sequence[ast.Call]) -> bool:
    names = {name_of(each.func) for each in decorators}
    if "command" not in names or names & {"option", "argument"}:
        return False
    return any(_owner(each.func) != "click" for each in decorators)


# -- dataclasses -----------------------------------------------------------------------------------


def fields(
    name: str, classes: Mapping[str, ast.ClassDef], notes: list[str], *, dashes: bool
) -> Iterator[DeclaredOption]:
    """Yield the options of a dataclass, after the options of its base classes."""
    found = classes.get(name)
    if found is None and name in _TRAINING_ARGUMENTS:
        yield DeclaredOption("output_dir", "--output_dir", "str", None, "", required=True)
        notes.append(
            f"the recipe contains only --output_dir of the options of {name}: add the options that you need, such as --num_train_epochs"
        )
        return
    if found is None:
        notes.append(f"the options of {name} are declared elsewhere: add those that you set")
        return
    for base in found.bases:
        yield from fields(name_of(base), classes, notes, dashes=dashes)
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            option = _option_of_field(node.target.id, node, dashes=dashes)
            if option is not None:
                yield option
            else:
                notes.append(
                    f"line {node.lineno}: {node.target.id} keeps its default, because it is not a single value"
                )


def _option_of_field(name: str, node: ast.AnnAssign, *, dashes: bool) -> DeclaredOption | None:
    """Return the option of a dataclass field; None if no command-line word can express its value."""
    kind, many, choices = _parse_annotation(node.annotation)
    if not kind:
        return None
    default, words = _field(node.value)
    has_factory = isinstance(node.value, ast.Call) and _keyword_value(node.value, "default_factory")
    required = default is None and not has_factory
    flag = f"--{name.replace('_', '-')}" if dashes else f"--{name}"
    negative = ""
    if kind == "bool" and dashes:
        negative = f"--no-{flag[2:]}"
    elif kind == "bool" and _is_literal(default, True):
        negative = f"--no_{flag[2:]}"
    return DeclaredOption(
        name,
        flag,
        kind,
        default,
        words,
        required,
        choices,
        many,
        negative,
        alone=kind == "bool" and not required,
    )


def _field(value: ast.expr | None) -> tuple[ast.expr | None, str]:
    """Return the default and the help text of a dataclass field."""
    if not isinstance(value, ast.Call) or name_of(value.func) not in ("field", "arg", "HfArg"):
        return value, ""
    return _keyword_value(value, "default"), _help_of_field(value)


def _help_of_field(call: ast.Call) -> str:
    """Return the help text of `field(metadata={"help": …})` or `HfArg(help=…)`."""
    metadata = _keyword_value(call, "metadata")
    if isinstance(metadata, ast.Dict):
        for key, value in zip(metadata.keys, metadata.values, strict=True):
            if text_of(key) == "help":
                return text_of(value)
    return text_of(_keyword_value(call, "help"))


# -- functions -------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """A parameter of a function that is a command."""

    name: str
    line: int
    annotation: ast.expr | None
    default: ast.expr | None  # None: no default
    option: ast.Call | None  # the `Option(…)` or `Argument(…)` that describes the parameter

    @property
    def named_flags(self) -> str:
        """The flags that `option` names, such as `--shuffle/--no-shuffle`; empty without any."""
        if self.option is None:
            return ""
        texts = map(text_of, self.option.args)
        return next((text for text in texts if text.startswith("--")), "")

    @property
    def help(self) -> str:
        if self.option is None:
            return ""
        return text_of(_keyword_value(self.option, "help"))

    def is_typer_argument(self) -> bool:
        """Return True if typer takes the parameter as a positional argument."""
        if self.option is None:
            return self.default is None
        return name_of(self.option.func) == "Argument"


def _parameters(function: ast.FunctionDef, tool: str, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the options that typer, tyro or fire derives from a function's parameters."""
    for parameter in _read_parameters(function):
        kind, many, choices = _parse_annotation(parameter.annotation)
        if not kind:
            continue
        if tool == "fire":
            yield _fire_option(parameter, kind, choices)
            continue
        is_positional = tool == "typer" and parameter.is_typer_argument()
        flag, negative = ("", "") if is_positional else _flags(parameter, kind)
        is_repeated = many and flag != ""  # typer has no flag with several words
        if tool == "typer" and is_repeated:
            notes.append(_note_repeated(parameter.line, flag))
            continue
        yield DeclaredOption(
            parameter.name,
            flag,
            kind,
            parameter.default,
            parameter.help,
            parameter.default is None,
            choices,
            many,
            negative,
            alone=bool(negative),
        )


def _read_parameters(function: ast.FunctionDef) -> Iterator[_Parameter]:
    """Yield the parameters of a function."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    required_count = len(plain) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * required_count, *arguments.defaults]
    for argument, default in [
        *zip(plain, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        annotation, option = _split_annotated(argument.annotation)
        if isinstance(default, ast.Call) and name_of(default.func) in ("Option", "Argument"):
            option = default
            first = default.args[0] if default.args else None
            default = _keyword_value(default, "default") or first
        if isinstance(default, ast.Constant) and default.value is ...:
            default = None
        yield _Parameter(argument.arg, argument.lineno, annotation, default, option)


def _split_annotated(node: ast.expr | None) -> tuple[ast.expr | None, ast.Call | None]:
    """Return the type of `Annotated[type, Option(…)]` and the first call; other annotations unchanged."""
    if not isinstance(node, ast.Subscript) or name_of(node.value) != "Annotated":
        return node, None
    if not isinstance(node.slice, ast.Tuple):
        return node, None
    annotation, *more = node.slice.elts
    option = next((each for each in more if isinstance(each, ast.Call)), None)
    return annotation, option


def _fire_option(parameter: _Parameter, kind: str, choices: tuple[str, ...]) -> DeclaredOption:
    """Return the option that fire derives; its default decides about the type without an annotation."""
    default = parameter.default
    if parameter.annotation is None and default is not None:
        kind = _type_of_literal(default)
    if kind not in _SCALARS:
        kind = "str"
    flag = f"--{parameter.name}="
    return DeclaredOption(parameter.name, flag, kind, default, "", default is None, choices)


def _flags(parameter: _Parameter, kind: str) -> tuple[str, str]:
    """Return the flag of a parameter, and for a boolean the flag that turns it off."""
    named, _, named_negative = parameter.named_flags.partition("/")
    flag = named or f"--{parameter.name.replace('_', '-')}"
    if kind != "bool":
        return flag, ""
    return flag, named_negative or f"--no-{flag[2:]}"


def _options_of_lightning(
    call: ast.Call, classes: Mapping[str, ast.ClassDef], notes: list[str]
) -> Iterator[DeclaredOption]:
    """Yield LightningCLI's options for its model and data classes, with two required trainer
    options first.
    """
    named = {
        "model": _keyword_value(call, "model_class"),
        "data": _keyword_value(call, "datamodule_class"),
    }
    named |= dict(zip(named, call.args, strict=False))
    yield DeclaredOption(
        "output_dir", "--trainer.default_root_dir=", "str", None, "", required=True
    )
    yield DeclaredOption("max_epochs", "--trainer.max_epochs=", "int", None, "", required=True)
    for section, given in named.items():
        name = name_of(given)
        if name:
            yield from _options_of_section(section, name, classes, notes)
    notes.append(
        "the options of Lightning's Trainer keep their defaults: to set an option, add --trainer.NAME=VALUE"
    )


def _options_of_section(
    section: str, name: str, classes: Mapping[str, ast.ClassDef], notes: list[str]
) -> Iterator[DeclaredOption]:
    """Yield the options of a section, which sets the parameters of the class `name`."""
    init = _init_of(classes[name]) if name in classes else None
    if init is None:
        notes.append(
            f"the options of {name} are declared elsewhere: add those that you set as --{section}.NAME=VALUE"
        )
        return
    # Neither `self` nor a positional-only parameter is an option.
    arguments = [*init.args.args[1:], *init.args.kwonlyargs]
    names = {argument.arg for argument in arguments}
    for each in _parameters(init, "fire", []):
        if each.name in names:
            yield each._replace(name=f"{section}_{each.name}", flag=f"--{section}.{each.name}=")


def _init_of(node: ast.ClassDef) -> ast.FunctionDef | None:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return each
    return None


def _options_of_click(call: ast.Call, notes: list[str]) -> Iterator[DeclaredOption]:
    """Yield the option that a click decorator declares."""
    names = list(filter(None, map(text_of, call.args)))
    if not names:
        return
    long = next((each for each in names if each.startswith("--")), names[0])
    yes, _, no = long.partition("/")
    flag = yes.strip()
    if _is_literal(_keyword_value(call, "multiple"), True):
        notes.append(_note_repeated(call.lineno, flag))
        return
    yield _option_of_click(call, names, flag, no)


def _option_of_click(
    call: ast.Call, names: Sequence[str], flag: str, negative: str
) -> DeclaredOption:
    """Return the option of a click decorator, given its names and the flags that turn it on and
    off.
    """
    # click names the parameter after a name without dashes, or else after the flag.
    name_of_flag = flag.lstrip("-").replace("-", "_")
    name = next((each for each in names if each.isidentifier()), name_of_flag)
    default = _keyword_value(call, "default")
    kind, choices = _click_type(_keyword_value(call, "type"), default)
    is_switch = bool(negative) or _is_literal(_keyword_value(call, "is_flag"), True)
    if is_switch:
        kind = "bool"
    elif kind not in _SCALARS:
        kind = "str"
    is_positional = name_of(call.func) == "argument"
    if is_positional:
        flag = ""
    is_optional = not is_positional or default is not None
    count = _keyword_value(call, "nargs")
    takes_several = count is not None and not _is_literal(count, 1)
    return DeclaredOption(
        name,
        flag,
        kind,
        default,
        text_of(_keyword_value(call, "help")),
        _is_required_by_click(call, is_optional=is_optional),
        choices,
        takes_several,
        negative=negative.strip(),
        alone=is_switch,
    )


def _is_required_by_click(call: ast.Call, *, is_optional: bool) -> bool:
    """Return the value of `required`; `is_optional` decides if the decorator leaves the value out."""
    required = _keyword_value(call, "required")
    if _is_literal(required, True):
        return True
    return not is_optional and not _is_literal(required, False)


def _click_type(node: ast.expr | None, default: ast.expr | None) -> tuple[str, tuple[str, ...]]:
    """Return the type of a click option, from its default if `node` is None, and its choices."""
    if node is None:
        return _type_of_literal(default), ()
    if not isinstance(node, ast.Call):
        name = name_of(node)
        return _CLICK_TYPES.get(name, name), ()
    name = name_of(node.func)
    if name == "Choice" and node.args:
        return "str", tuple(text_of(each) for each in getattr(node.args[0], "elts", ()))
    return _CLICK_TYPES.get(name) or _CLICK_RANGES.get(name, "str"), ()


def _note_repeated(line: int, flag: str) -> str:
    return f"line {line}: {flag} keeps its default, because the option is repeated for each value: add the options that you need to `run`"


# -- words -----------------------------------------------------------------------------------------


def _parse_annotation(node: ast.expr | None) -> tuple[str, bool, tuple[str, ...]]:
    """Return an annotation's type, whether the option takes several values, and the choices of a
    Literal.

    The type is empty if no command-line word can express the annotation. A missing annotation
    counts as str.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if node is None:
        return "str", False, ()
    if isinstance(node, ast.BinOp):  # int | None
        if _is_literal(node.left, None):
            return _parse_annotation(node.right)
        return _parse_annotation(node.left)
    if isinstance(node, ast.Subscript):
        return _parse_subscript(node)
    word = name_of(node)
    return word if word in _SCALARS else "", False, ()


def _parse_subscript(node: ast.Subscript) -> tuple[str, bool, tuple[str, ...]]:
    """Return the same values as `_parse_annotation` for Optional, Union, Literal and lists."""
    word, inside = name_of(node.value), node.slice
    parts = list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]
    if word in ("Optional", "Union"):
        first = next((each for each in parts if not _is_literal(each, None)), None)
        return _parse_annotation(first)
    if word == "Literal":
        choices = tuple(str(each.value) for each in parts if isinstance(each, ast.Constant))
        return "str", False, choices
    if word in ("list", "List", "Sequence"):
        return _parse_annotation(parts[0])[0], True, ()
    return "", False, ()


def _type_of_literal(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and node.value is not None:
        return type(node.value).__name__
    return "str"


def _keyword_value(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _is_literal(node: ast.expr | None, value: object) -> bool:
    # A negative number is the operator `-` with a literal.
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = node.operand
        if not isinstance(operand, ast.Constant) or not isinstance(operand.value, int):
            return False
        return -operand.value == value
    return isinstance(node, ast.Constant) and node.value is value


def _owner(node: ast.AST) -> str:
    return name_of(node.value) if isinstance(node, ast.Attribute) else ""
