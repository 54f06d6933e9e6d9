"""Find a training script's options, inputs and outputs in its syntax tree, without running it.

Reads argparse options itself. Other option parsers are in `script_declared`, `script_globals` and
`script_hydra`. The role of a path option follows from its use, such as `open(args.data)`,
`torch.save(model, args.out)` or `args.cache.mkdir()`. Without a known use, it follows from the
option's name. `Script.notes` lists the parts that this module does not understand.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from ..language.python_reader import of_tree
from . import script_hydra
from .script_declared import DeclaredOption, find_declared, text_of
from .script_defaults import Defaults
from .script_globals import of_globals
from .script_printed import find_loss_pattern

Role = Literal["value", "input", "output", "state", "resume", "off"]
"""The use of an option.

`off` is an output that the script does not write by default, so the recipe leaves it out.
"""

Type = Literal["string", "integer", "number", "boolean"]

_TYPES: Final[dict[str, Type]] = {"int": "integer", "float": "number"}
_READERS: Final = frozenset(
    {
        "read_csv",
        "read_json",
        "read_parquet",
        "read_table",
        "loadtxt",
        "genfromtxt",
        "load",
        "load_file",
        "from_file",
        "from_pretrained",
    }
    | {
        "memmap",
        "fromfile",
        "load_dataset",
        "load_from_disk",
        "imread",
        "ImageFolder",
        "read_text",
        "read_bytes",
    }
)
_LISTERS: Final = frozenset(
    {
        "listdir",
        "scandir",
        "walk",
        "iterdir",
        "glob",
        "rglob",
        "iglob",
        "ImageFolder",
        "load_from_disk",
    }
)
_WRITERS: Final = frozenset(
    {
        "save",
        "savez",
        "savetxt",
        "save_file",
        "save_pretrained",
        "save_state",
        "to_csv",
        "to_json",
        "to_parquet",
        "savefig",
        "imsave",
        "write_text",
    }
    | {"write_bytes", "save_model", "dump", "touch"}
)
_MAKERS: Final = frozenset({"mkdir", "makedirs", "save_pretrained", "save_state", "SummaryWriter"})
_METHODS: Final = frozenset(
    {
        "read_text",
        "read_bytes",
        "write_text",
        "write_bytes",
        "mkdir",
        "touch",
        "iterdir",
        "glob",
        "rglob",
    }
)
"""`Path` methods whose arguments are not paths."""
_SAME: Final = frozenset({"absolute", "as_posix", "expanduser", "resolve"})
"""`Path` methods that return the same path."""
_KEYWORDS: Final = frozenset(
    {
        "path",
        "file",
        "filename",
        "fname",
        "filepath",
        "data_files",
        "root",
        "save_directory",
        "output_dir",
        "path_or_buf",
        "log_dir",
    }
)
_PATH: Final = re.compile(r"[\w./-]*/[\w./-]+|[\w.-]*\w\.[A-Za-z]\w{0,11}")
_WRAPPERS: Final = frozenset(
    {"Path", "PurePath", "str", "fspath", "abspath", "realpath", "expanduser"}
)
_OUTPUT_WORDS: Final = frozenset(
    {
        "out",
        "output",
        "outputs",
        "save",
        "export",
        "result",
        "results",
        "log",
        "logdir",
        "logs",
        "write",
        "dest",
        "plot",
    }
)
_DATA_WORDS: Final = frozenset(
    {"data", "dataset", "datasets", "corpus", "images", "train", "texts"}
)
_LOCATION_WORDS: Final = frozenset({"dir", "path", "file", "folder"})
_PATH_WORDS: Final = _LOCATION_WORDS | {"data", "dataset"}
_MODEL_NAMES: Final = frozenset({"model", "base", "base_model", "model_name_or_path", "pretrained"})
_RESUME: Final = re.compile(r"resume\w*|from_checkpoint|load_checkpoint|restore\w*|init_from")
_STATE: Final = re.compile(r"\w*(checkpoint|ckpt)\w*")


@dataclass(frozen=True, slots=True)
class Option:
    """A command-line argument of the script."""

    name: str  # name of the attribute, field or parameter in the script
    flag: str  # empty for a positional argument
    type: Type = "string"
    default: str | None = None  # Python source of a literal; None if missing or computed
    required: bool = False
    many: bool = False
    choices: tuple[str, ...] = ()
    switch: bool = False  # the flag takes no value
    negative: str = ""  # the flag that turns a boolean off
    help: str = ""
    role: Role = "value"
    folder: bool = False
    model: bool = False
    pattern: str = ""  # file name pattern of checkpoints, for state
    guessed: bool = False  # the role follows from the name alone
    empty: bool = False  # the default is missing, None or an empty text

    @property
    def words(self) -> frozenset[str]:
        return frozenset(self.name.lower().split("_"))


@dataclass(frozen=True, slots=True)
class Script:
    """The facts about a script.

    `reads` and `writes` are literal paths in its source. A final slash marks a directory.
    """

    options: tuple[Option, ...] = ()
    imports: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    metrics: str | bool = (
        False  # True: the script uses $RECIPE_METRICS; str: regular expression for its loss line
    )
    doc: str = ""
    notes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()  # command words before the options
    targets: tuple[str, ...] = ()  # dotted names in `_target_` keys of the Hydra configuration
    unwritten: tuple[str, ...] = ()  # literal paths that it does not write by default


def read(source: str, config: script_hydra.Find = lambda folder, name: None) -> Script:
    """Return the facts about a script from its source text.

    `config` finds the script's Hydra configuration. Raises SyntaxError.
    """
    tree = ast.parse(source)
    notes: list[str] = []
    arguments = [_option(call, notes) for call in _calls(tree)]
    hydra = script_hydra.find_hydra(tree, config, notes)
    declared = [*find_declared(tree, notes), *of_globals(tree, notes)]
    if hydra is not None:
        declared += hydra.options
    named = [_of_declared(each) for each in declared]
    options = [option for option in arguments if option is not None] + named
    use = _used(tree, options, {option.name for option in named})
    _note_commands(tree, notes)
    if not options and hydra is None and not notes:
        _note_no_options(source, notes)
    # The last of two options with the same name wins, as in argparse.
    options_by_name = {option.name: _with_role(option, use) for option in options}
    texts_read = [*use.texts_read]
    if hydra is not None and hydra.folder:
        texts_read.append(f"{hydra.folder}/")
    written = tuple(dict.fromkeys(use.texts_written))
    return Script(
        options=tuple(options_by_name.values()),
        imports=of_tree(tree).module_names,
        reads=tuple(dict.fromkeys(texts_read)),
        writes=written,
        metrics="RECIPE_METRICS" in source or find_loss_pattern(tree),
        doc=(ast.get_docstring(tree) or "").strip().split("\n\n")[0].replace("\n", " "),
        notes=tuple(notes),
        words=("hydra.run.dir=.",) if hydra is not None else _words(tree),
        targets=hydra.targets if hydra is not None else (),
        unwritten=tuple(path for path in dict.fromkeys(use.texts_off) if path not in written),
    )


def _note_commands(tree: ast.Module, notes: list[str]) -> None:
    """Append a note on the subcommands of the script to `notes`."""
    calls = [call for call in _calls(tree) if _is_method(call, "add_parser") and call.args]
    if calls:
        commands = ", ".join(text_of(call.args[0]) for call in calls)
        notes.append(
            f"the script has subcommands ({commands}): put one after the script in `run`, and keep only its options"
        )


def _note_no_options(source: str, notes: list[str]) -> None:
    if "sys.argv" in source:
        notes.append("the script takes its options from sys.argv, which `recipe new` cannot read")
    else:
        notes.append("the script takes no options")


def _words(tree: ast.Module) -> tuple[str, ...]:
    """Return the command words before the options, such as `fit` for LightningCLI."""
    for call in _calls(tree):
        name = (
            call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        )
        if name == "LightningCLI" and not any(each.arg == "run" for each in call.keywords):
            return ("fit",)
    return ()


def _used(tree: ast.Module, options: Sequence[Option], parameters: set[str]) -> _Use:
    """Collect the paths that a script reads and writes.

    `parameters` are options that the script uses as plain variables. The body of a function called
    only under conditions that are false by default counts as off by default.
    """
    idle: frozenset[str] = frozenset()
    for _ in range(2):
        use = _Use(tree, options, idle)
        use.aliases |= {name: (name, False) for name in parameters}
        use.visit(tree)
        idle = frozenset(use.called_off - use.called)
    return use


def _is_method(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


# -- options ----------------------------------------------------------------------------------------------------------------------------------------


def _option(call: ast.Call, notes: list[str]) -> Option | None:
    """Return the option of an `add_argument` call.

    None for other calls, for `--help` and `--version`, and for options that this module cannot read.
    """
    if not _is_method(call, "add_argument"):
        return None
    flags = [
        arg.value
        for arg in call.args
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
    ]
    if not flags or len(flags) != len(call.args):
        notes.append(f"line {call.lineno}: the option name is computed, so it was skipped")
        return None
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    flag = next((each for each in flags if each.startswith("--")), flags[0])
    what = given.get("action")
    action = what.attr if isinstance(what, ast.Attribute) else text_of(what)
    if action in ("help", "version"):
        return None
    if action in ("store_true", "store_false", "BooleanOptionalAction"):
        return _switch(flag, action, given)
    if action not in ("", "store"):
        notes.append(f"line {call.lineno}: {flag} is left to its default: its action is {action}")
        return None
    return _value_option(flag, given, call.lineno, notes)


def _named_option(flag: str, given: Mapping[str, ast.expr]) -> Option:
    """Return an option with its name, flag and help."""
    help_text = text_of(given.get("help")).replace("%(default)s", "the default")
    return Option(
        text_of(given.get("dest")) or _attribute_name(flag),
        flag if flag.startswith("-") else "",
        help=" ".join(help_text.split()),
    )


def _attribute_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _switch(flag: str, action: str, given: Mapping[str, ast.expr]) -> Option:
    """Return the boolean option of a flag without a value."""
    option = replace(_named_option(flag, given), type="boolean", switch=True, default="False")
    if action == "store_false":
        return replace(option, name=_attribute_name(flag))
    if action == "BooleanOptionalAction":
        is_on = _plain(given.get("default")) == "True"
        return replace(option, default="True" if is_on else "False", negative=f"--no-{flag[2:]}")
    return option


def _value_option(flag: str, given: Mapping[str, ast.expr], line: int, notes: list[str]) -> Option:
    """Return the option of an argument with values."""
    is_positional = not flag.startswith("-")
    type_name = _last_name(given.get("type"))
    default = given.get("default")
    count = _plain(given.get("nargs"))
    is_optional = count in ("'?'", "'*'")
    choices = _choices(given.get("choices"))
    if "choices" in given and not choices:
        notes.append(
            f"line {line}: {flag} takes one of a few values, which are not written out there"
        )
    is_truth = type_name not in _TYPES and _plain(default) in ("True", "False")
    if is_truth:
        notes.append(
            f"line {line}: {flag} gets the word true or false: check that the script accepts it"
        )
    is_required = (is_positional and not is_optional) or _plain(given.get("required")) == "True"
    return replace(
        _named_option(flag, given),
        type="boolean" if is_truth else _TYPES.get(type_name, "string"),
        default=None if default is None or is_required else _plain(default),
        required=is_required,
        many=count not in ("", "None", "'?'"),
        choices=choices,
        empty=not is_required and _is_empty(default),
    )


def _last_name(node: ast.expr | None) -> str:
    """Return the name of a variable, or the last name of `module.name`; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_empty(default: ast.AST | None) -> bool:
    return default is None or (isinstance(default, ast.Constant) and default.value in (None, ""))


def _of_declared(each: DeclaredOption) -> Option:
    """Convert an option declared by a field, a decorator or a parameter."""
    default = None if each.required or each.default is None else _plain(each.default)
    option = Option(
        each.name,
        each.flag,
        required=each.required,
        many=each.many,
        choices=each.choices,
        help=" ".join(each.help.split()),
    )
    if each.alone:
        return replace(
            option,
            type="boolean",
            switch=True,
            default="True" if default == "True" else "False",
            negative=each.negative,
            required=False,
        )
    return replace(
        option,
        type="boolean" if each.type == "bool" else _TYPES.get(each.type, "string"),
        default=default,
        empty=not each.required and _is_empty(each.default),
    )


def _choices(node: ast.AST | None) -> tuple[str, ...]:
    items = node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else []
    values = [str(each.value) for each in items if isinstance(each, ast.Constant)]
    return tuple(values) if len(values) == len(items) else ()


def _plain(node: ast.AST | None) -> str | None:
    """Return the Python source of a literal, such as `0.1` or `['a', 'b']`.

    For a call of `Path`, return the source of its argument. Without a node, return an empty text.
    Returns None for the literal None and for computed values.
    """
    if node is None:
        return ""
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Path"
        and len(node.args) == 1
    ):
        return _plain(node.args[0])
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return ast.unparse(node) if value is not None else None


# -- roles of paths --------------------------------------------------------------------------------------------------------------------------------


@dataclass
class _Touched:
    """The uses of an option's path in the script."""

    read: bool = False
    written: bool = False
    made: bool = False  # written in code that is not off by default
    folder: bool = False
    model: bool = False
    patterns: list[str] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        return self.read or self.written


class _Use(ast.NodeVisitor):
    """Visitor that collects the uses of each path, for options by name and for literal paths."""

    def __init__(self, tree: ast.AST, options: Sequence[Option], idle: Set[str]) -> None:
        self.names = {option.name for option in options}
        self.defaults = Defaults(options, self._base)
        self.asked: set[str] = set()
        """Options tested in conditions."""
        self.called, self.called_off = set[str](), set[str]()
        self.texts_off: list[str] = []
        self._idle, self._off = idle, 0  # depth of code that is off by default
        self.done: dict[str, _Touched] = {}
        self.once = _assigned_once(tree)
        self.aliases: dict[str, tuple[Any, bool]] = {}
        self.written: dict[str, ast.expr] = {}  # the path expression assigned to each name
        self.texts_read: list[str] = []
        self.texts_written: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.asked |= self.defaults.names_in(node.test)
        holds = self.defaults.holds(node.test)
        for body, off in ((node.body, holds is False), (node.orelse, holds is True)):
            self._off += off
            for each in body:
                self.visit(each)
            self._off -= off

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        off = node.name in self._idle
        self._off += off
        self.generic_visit(node)
        self._off -= off

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        self._name(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._name([node.target], node.value)

    def _name(self, targets: list[ast.expr], value: ast.expr) -> None:
        base = self._base(value)
        for target in targets:
            if (
                base is not None
                and (name := _dotted_name(target))
                and name not in self.names
                and (name in self.once or not isinstance(base[0], ast.Constant))
            ):
                self.aliases[name] = base
                self.written[name] = value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        func = node.func
        word = (
            func.attr
            if isinstance(func, ast.Attribute)
            else func.id
            if isinstance(func, ast.Name)
            else ""
        )
        (self.called_off if self._off else self.called).add(word)
        owner = (
            func.value
            if isinstance(func, ast.Attribute) and self._base(func.value) is not None
            else None
        )
        places = [
            *node.args,
            *(keyword.value for keyword in node.keywords if keyword.arg in _KEYWORDS),
        ]
        reads, writes = word in _READERS or word in _LISTERS, word in _WRITERS or word in _MAKERS
        if word == "open":
            modes = [
                *(node.args[:1] if owner is not None else node.args[1:2]),
                *(keyword.value for keyword in node.keywords if keyword.arg == "mode"),
            ]
            mode = next((text_of(each) for each in modes), "r")
            reads, writes = not set(mode) & set("wax"), bool(set(mode) & set("wax+"))
            places = [owner] if owner is not None else node.args[:1]
        elif word in (
            "rename",
            "replace",
        ):  # renames a checkpoint; str.replace, with literal arguments, is excluded
            writes, places = (
                True,
                [
                    arg
                    for arg in node.args
                    if (base := self._base(arg)) is not None
                    and not isinstance(base[0], ast.Constant)
                ],
            )
        elif word in _METHODS and owner is not None:
            places = [owner]
        if not (reads or writes):
            return
        for place in places:
            if (base := self._base(place)) is not None:
                self._touch(base, place, reads, writes, word)

    def _touch(
        self, base: tuple[Any, bool], place: ast.expr, reads: bool, writes: bool, word: str
    ) -> None:
        origin, below = base
        if isinstance(origin, ast.Constant):
            path = str(origin.value).rstrip("/")
            folder = (
                "/"
                if word in _MAKERS or word in _LISTERS or str(origin.value).endswith("/")
                else ""
            )
            if not folder and not _PATH.fullmatch(re.sub(r"(?<=\w) (?=\w)", "_", path)):
                return
            if reads:
                self.texts_read.append(path + folder)
            elif writes:
                (self.texts_off if self._off else self.texts_written).append(path + folder)
            return
        touched = self.done.setdefault(origin, _Touched())
        touched.read |= reads
        touched.written |= writes
        touched.made |= writes and not self._off
        touched.folder |= below or word in _LISTERS or word in _MAKERS
        touched.model |= word == "from_pretrained"
        place = self.written.get(_dotted_name(place), place)
        if writes and below and (pattern := _pattern(place)):
            touched.patterns.append(pattern)

    def _base(self, node: ast.expr) -> tuple[Any, bool] | None:
        """Return the origin of a path expression, and whether the path is below the origin.

        The origin is the name of an option or a literal. Returns None for other expressions.
        """
        if isinstance(node, ast.Attribute):
            if (
                isinstance(node.value, ast.Name)
                and node.attr in self.names
                and node.value.id not in ("os", "torch", "np", "json", "self")
            ):
                return node.attr, False
            if node.attr == "parent" and (base := self._base(node.value)) is not None:
                return base
            return self.aliases.get(_dotted_name(node))
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Constant):
            return (node, False) if isinstance(node.value, str) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return self._below(node.left, node.right)
        if (
            isinstance(node, ast.JoinedStr)
            and node.values
            and isinstance(node.values[0], ast.FormattedValue)
        ):
            first, rest = node.values[0].value, node.values[1:]
            base = self._base(first)
            joined = (
                base is None
                or not isinstance(base[0], ast.Constant)
                or text_of(next(iter(rest), None)).startswith("/")
            )
            return self._below(first, *rest) if joined else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _SAME and not node.args:
                return self._base(node.func.value)
            if node.func.attr == "joinpath":
                return self._below(node.func.value, *node.args)
        if isinstance(node, ast.Call) and node.args:
            word = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else node.func.id
                if isinstance(node.func, ast.Name)
                else ""
            )
            if word == "join" or (word == "Path" and len(node.args) > 1):
                return self._below(*node.args)
            if word in _WRAPPERS:
                return self._base(node.args[0])
        return None

    def _below(self, node: ast.expr, *parts: ast.expr) -> tuple[Any, bool] | None:
        """Return the origin of a path joined from `node` and `parts`, as `_base` does.

        For a literal directory, the origin is the joined path, or the directory if a part varies.
        """
        base = self._base(node)
        if base is None or not isinstance(base[0], ast.Constant):
            return (base[0], True) if base is not None else None
        if base[1]:
            return base  # the part below the directory varies
        folder, texts = str(base[0].value).rstrip("/"), [text_of(part).strip("/") for part in parts]
        if all(texts):
            return ast.Constant("/".join([folder, *texts])), False
        return ast.Constant(f"{folder}/"), True


def _assigned_once(tree: ast.AST) -> set[str]:
    """Return the names that are assigned exactly once in a script and are not parameters."""
    counts: Counter[str] = Counter()
    parameters: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            parameters.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            counts[_dotted_name(node)] += 1
    once = {name for name, count in counts.items() if count == 1 and name}
    return once - parameters


def _dotted_name(node: ast.expr) -> str:
    """Return a variable's name, such as `out` or `self.out`; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return (
            f"self.{node.attr}"
            if isinstance(node.value, ast.Name) and node.value.id == "self"
            else ""
        )
    return node.id if isinstance(node, ast.Name) else ""


def _pattern(place: ast.expr) -> str:
    """Return the file name pattern of a path expression, such as `step-*.json`.

    Returns an empty text if the name has no variable part or no fixed part.
    """
    last: ast.AST = place
    if isinstance(place, ast.BinOp):
        last = place.right
    elif isinstance(place, ast.Call) and len(place.args) > 1:
        last = place.args[-1]
    if not isinstance(last, ast.JoinedStr):
        return ""
    parts = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in last.values]
    name = re.sub(r"\*+", "*", "".join(parts)).strip("/").rpartition("/")[2]
    return name if "*" in name and name != "*" else ""


def _with_role(option: Option, use: _Use) -> Option:
    """Return the option with its role. The use in the script takes precedence over the name."""
    if option.type != "string" or option.choices:
        return option
    touched = use.done.get(option.name, _Touched())
    if _RESUME.fullmatch(option.name.lower()) and not option.default:
        return replace(option, role="resume")
    if _is_state(option, touched):
        return replace(option, role="state", folder=True, pattern=_checkpoint_pattern(touched))
    if touched.written or (not touched.is_known and option.words & _OUTPUT_WORDS):
        role = _output_role(option, touched, is_tested=option.name in use.asked)
        return replace(option, role=role, folder=_has_folder(option, touched))
    if touched.model or (not touched.is_known and option.name.lower() in _MODEL_NAMES):
        return replace(option, role="input", model=True)
    if touched.read or (option.words & _DATA_WORDS and option.words & _PATH_WORDS):
        is_guess = not touched.read and not option.words & _LOCATION_WORDS
        folder = _has_folder(option, touched) or bool(option.words & _DATA_WORDS)
        return replace(option, role="input", folder=folder, guessed=is_guess)
    return option


def _has_folder(option: Option, touched: _Touched) -> bool:
    """Return True if the script uses the option as a directory, or its name says so."""
    return touched.folder or bool(option.words & {"dir", "folder", "directory"})


def _is_state(option: Option, touched: _Touched) -> bool:
    """Return True if checkpoints are saved below the path, or the option's name says so."""
    if any(_STATE.match(pattern) for pattern in touched.patterns):
        return True
    if not _STATE.fullmatch(option.name.lower()):
        return False
    return touched.written or (not touched.is_known and _has_folder(option, touched))


def _checkpoint_pattern(touched: _Touched) -> str:
    """Return the file name pattern of checkpoints, otherwise the first pattern or an empty text."""
    named = [pattern for pattern in touched.patterns if _STATE.match(pattern)]
    return next(iter(named + touched.patterns), "")


def _output_role(option: Option, touched: _Touched, *, is_tested: bool) -> Role:
    """Return "off" for an output that the script does not write by default, otherwise "output".

    An option with an empty default is off if a condition tests it or its use is unknown.
    """
    if touched.written and not touched.made:
        return "off"
    is_guess = not touched.is_known and not option.words & {"out", "output", "outputs"}
    return "off" if option.empty and (is_tested or is_guess) else "output"
