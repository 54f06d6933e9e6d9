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
from typing import Final, Literal, NamedTuple

from ..language.python_reader import of_tree
from . import script_hydra
from .script_declared import DeclaredOption, find_declared
from .script_defaults import Defaults
from .script_globals import of_globals
from .script_printed import find_loss_pattern
from .script_syntax import calls_in, keywords_of, name_of, text_of

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
_OTHER_OWNERS: Final = frozenset({"os", "torch", "np", "json", "self"})
"""Names whose attributes are not options."""
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
    arguments = list(_argparse_options(tree, notes))
    hydra = script_hydra.find_hydra(tree, config, notes)
    named = _declared_options(tree, hydra, notes)
    options = arguments + named
    use = _collect_uses(tree, options, {option.name for option in named})
    _note_commands(tree, notes)
    has_options = bool(options) or hydra is not None
    if not has_options and not notes:
        _note_no_options(source, notes)
    # The last of two options with the same name wins, as in argparse.
    options_by_name = {option.name: _with_role(option, use) for option in options}
    written = tuple(dict.fromkeys(use.texts_written))
    unwritten = [path for path in dict.fromkeys(use.texts_off) if path not in written]
    return Script(
        options=tuple(options_by_name.values()),
        imports=of_tree(tree).module_names,
        reads=_paths_read(use, hydra),
        writes=written,
        metrics="RECIPE_METRICS" in source or find_loss_pattern(tree),
        doc=_summary(tree),
        notes=tuple(notes),
        words=_words(tree, hydra),
        targets=() if hydra is None else hydra.targets,
        unwritten=tuple(unwritten),
    )


def _declared_options(
    tree: ast.Module, hydra: script_hydra.HydraOptions | None, notes: list[str]
) -> list[Option]:
    """Return the options that the script uses as plain variables."""
    declared = [*find_declared(tree, notes), *of_globals(tree, notes)]
    if hydra is not None:
        declared += hydra.options
    return [_option_of_declared(each) for each in declared]


def _paths_read(use: _Use, hydra: script_hydra.HydraOptions | None) -> tuple[str, ...]:
    paths = list(use.texts_read)
    if hydra is not None and hydra.folder:
        paths.append(f"{hydra.folder}/")
    return tuple(dict.fromkeys(paths))


def _summary(tree: ast.Module) -> str:
    """Return the first paragraph of the script's docstring on one line; empty without any."""
    text = ast.get_docstring(tree) or ""
    return text.strip().split("\n\n")[0].replace("\n", " ")


def _note_commands(tree: ast.Module, notes: list[str]) -> None:
    """Append a note on the subcommands of the script to `notes`."""
    commands = []
    for call in calls_in(tree):
        if _is_method(call, "add_parser") and call.args:
            commands.append(text_of(call.args[0]))
    if commands:
        notes.append(
            f"the script has subcommands ({', '.join(commands)}): put one after the script in `run`, and keep only its options"
        )


def _note_no_options(source: str, notes: list[str]) -> None:
    if "sys.argv" in source:
        notes.append("the script takes its options from sys.argv, which `recipe new` cannot read")
    else:
        notes.append("the script takes no options")


def _words(tree: ast.Module, hydra: script_hydra.HydraOptions | None) -> tuple[str, ...]:
    """Return the command words before the options, such as `fit` for LightningCLI."""
    if hydra is not None:
        return ("hydra.run.dir=.",)
    for call in calls_in(tree):
        has_run = any(each.arg == "run" for each in call.keywords)
        if name_of(call.func) == "LightningCLI" and not has_run:
            return ("fit",)
    return ()


def _collect_uses(tree: ast.Module, options: Sequence[Option], parameters: set[str]) -> _Use:
    """Collect the paths that a script reads and writes.

    `parameters` are options that the script uses as plain variables. The body of a function called
    only under conditions that are false by default counts as off by default.
    """
    idle: frozenset[str] = frozenset()
    for _ in range(2):
        use = _Use(tree, options, idle)
        use.aliases |= {name: _Origin(name) for name in parameters}
        use.visit(tree)
        idle = frozenset(use.called_off - use.called)
    return use


def _is_method(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == name


# -- options ---------------------------------------------------------------------------------------


def _argparse_options(tree: ast.Module, notes: list[str]) -> Iterator[Option]:
    """Yield the options of `add_argument` calls."""
    for call in calls_in(tree):
        option = _option(call, notes)
        if option is not None:
            yield option


def _option(call: ast.Call, notes: list[str]) -> Option | None:
    """Return the option of an `add_argument` call.

    None for other calls, for `--help` and `--version`, and for options that this module cannot
    read.
    """
    if not _is_method(call, "add_argument"):
        return None
    flags: list[str] = []
    for arg in call.args:
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
            flags.append(arg.value)
    if not flags or len(flags) != len(call.args):
        notes.append(f"line {call.lineno}: the option name is computed, so it was skipped")
        return None
    given = keywords_of(call)
    flag = _main_flag(flags)
    what = given.get("action")
    action = what.attr if isinstance(what, ast.Attribute) else text_of(what)
    if action in ("help", "version"):
        return None
    if action in ("store_true", "store_false", "BooleanOptionalAction"):
        return _switch(flag, action, given)
    if action not in ("", "store"):
        notes.append(
            f"line {call.lineno}: {flag} keeps its default, because its action is {action}"
        )
        return None
    return _value_option(flag, given, call.lineno, notes)


def _main_flag(flags: Sequence[str]) -> str:
    """Return the first long flag, or else the first flag."""
    for flag in flags:
        if flag.startswith("--"):
            return flag
    return flags[0]


def _named_option(flag: str, given: Mapping[str, ast.expr]) -> Option:
    """Return an option with its name, flag and help."""
    name = text_of(given.get("dest")) or _attribute_name(flag)
    help_text = text_of(given.get("help")).replace("%(default)s", "the default")
    if not flag.startswith("-"):  # a positional argument
        flag = ""
    return Option(name, flag, help=" ".join(help_text.split()))


def _attribute_name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _switch(flag: str, action: str, given: Mapping[str, ast.expr]) -> Option:
    """Return the boolean option of a flag without a value."""
    option = replace(_named_option(flag, given), type="boolean", switch=True, default="False")
    if action == "store_false":
        return replace(option, name=_attribute_name(flag))
    if action == "BooleanOptionalAction":
        is_on = _source_of_literal(given.get("default")) == "True"
        return replace(option, default=str(is_on), negative=f"--no-{flag[2:]}")
    return option


def _value_option(flag: str, given: Mapping[str, ast.expr], line: int, notes: list[str]) -> Option:
    """Return the option of an argument with values."""
    is_positional = not flag.startswith("-")
    type_name = name_of(given.get("type"))
    default = given.get("default")
    count = _source_of_literal(given.get("nargs"))
    is_optional = count in ("'?'", "'*'")
    choices = _choices(given.get("choices"))
    if "choices" in given and not choices:
        notes.append(
            f"line {line}: {flag} takes one of several values, which the script computes: check the value"
        )
    is_truth = type_name not in _TYPES and _source_of_literal(default) in ("True", "False")
    if is_truth:
        notes.append(
            f"line {line}: {flag} gets the word true or false: check that the script accepts it"
        )
    is_marked = _source_of_literal(given.get("required")) == "True"
    is_required = is_marked or (is_positional and not is_optional)
    kind: Type = "boolean" if is_truth else _TYPES.get(type_name, "string")
    option = replace(
        _named_option(flag, given),
        type=kind,
        required=is_required,
        many=count not in ("", "None", "'?'"),
        choices=choices,
    )
    if is_required:
        return option
    source = None if default is None else _source_of_literal(default)
    return replace(option, default=source, empty=_is_empty(default))


def _is_empty(default: ast.AST | None) -> bool:
    if default is None:
        return True
    return isinstance(default, ast.Constant) and default.value in (None, "")


def _option_of_declared(each: DeclaredOption) -> Option:
    """Convert an option declared by a field, a decorator or a parameter."""
    default = None
    if each.default is not None and not each.required:
        default = _source_of_literal(each.default)
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
            default=str(default == "True"),
            negative=each.negative,
            required=False,
        )
    kind: Type = "boolean" if each.type == "bool" else _TYPES.get(each.type, "string")
    is_empty = not each.required and _is_empty(each.default)
    return replace(option, type=kind, default=default, empty=is_empty)


def _choices(node: ast.AST | None) -> tuple[str, ...]:
    items = node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else []
    values = [str(each.value) for each in items if isinstance(each, ast.Constant)]
    return tuple(values) if len(values) == len(items) else ()


def _source_of_literal(node: ast.AST | None) -> str | None:
    """Return the Python source of a literal, such as `0.1` or `['a', 'b']`.

    For a call of `Path`, return the source of its argument. Without a node, return an empty text.
    Returns None for the literal None and for computed values.
    """
    if node is None:
        return ""
    if isinstance(node, ast.Call) and _is_path(node):
        return _source_of_literal(node.args[0])
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    return ast.unparse(node) if value is not None else None


def _is_path(call: ast.Call) -> bool:
    """Return True for a call of `Path` with one argument."""
    is_named_path = isinstance(call.func, ast.Name) and call.func.id == "Path"
    return is_named_path and len(call.args) == 1


# -- roles of paths --------------------------------------------------------------------------------


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


class _Origin(NamedTuple):
    """The option or the literal at the start of a path expression."""

    source: str | ast.Constant  # name of the option, or the literal
    is_below: bool = False  # the path is below the origin


class _Access(NamedTuple):
    """The use of paths by a call."""

    word: str  # name of the called function
    reads: bool
    writes: bool
    places: Sequence[ast.expr]

    @property
    def is_of_folders(self) -> bool:
        return self.word in _LISTERS | _MAKERS


class _Use(ast.NodeVisitor):
    """Visitor that collects the uses of each path, for options by name and for literal paths."""

    def __init__(self, tree: ast.AST, options: Sequence[Option], idle: Set[str]) -> None:
        self.names = {option.name for option in options}
        self.defaults = Defaults(options, self._origin)
        self.asked: set[str] = set()
        """Options tested in conditions."""
        self.called, self.called_off = set[str](), set[str]()
        self.texts_off: list[str] = []
        self._idle, self._off = idle, 0  # depth of code that is off by default
        self.done: dict[str, _Touched] = {}
        self.once = _names_assigned_once(tree)
        self.aliases: dict[str, _Origin] = {}
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
        self._remember_aliases(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._remember_aliases([node.target], node.value)

    def _remember_aliases(self, targets: list[ast.expr], value: ast.expr) -> None:
        """Remember the variables that an assignment sets to a path."""
        origin = self._origin(value)
        if origin is None:
            return
        is_literal = isinstance(origin.source, ast.Constant)
        for target in targets:
            name = _dotted_name(target)
            if not name or name in self.names:
                continue
            if name in self.once or not is_literal:
                self.aliases[name] = origin
                self.written[name] = value

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        word = name_of(node.func)
        called = self.called_off if self._off else self.called
        called.add(word)
        access = self._access(node, word)
        if not (access.reads or access.writes):
            return
        for place in access.places:
            origin = self._origin(place)
            if origin is not None:
                self._touch(origin, place, access)

    def _access(self, node: ast.Call, word: str) -> _Access:
        """Return the use of paths by a call of the function or method `word`."""
        owner = self._path_with_method(node)
        if word == "open":
            return _access_by_open(node, owner)
        if word in ("rename", "replace"):
            # A checkpoint is renamed. `str.replace`, with literal arguments, is excluded.
            renamed = [each for each in node.args if self._starts_with_option(each)]
            return _Access(word, reads=False, writes=True, places=renamed)
        reads = word in _READERS | _LISTERS
        writes = word in _WRITERS | _MAKERS
        if word in _METHODS and owner is not None:
            return _Access(word, reads, writes, [owner])
        named = [keyword.value for keyword in node.keywords if keyword.arg in _KEYWORDS]
        return _Access(word, reads, writes, [*node.args, *named])

    def _path_with_method(self, node: ast.Call) -> ast.expr | None:
        """Return `path` for a call `path.method()`; None if it is not a known path."""
        if isinstance(node.func, ast.Attribute) and self._origin(node.func.value) is not None:
            return node.func.value
        return None

    def _starts_with_option(self, node: ast.expr) -> bool:
        origin = self._origin(node)
        return origin is not None and not isinstance(origin.source, ast.Constant)

    def _touch(self, origin: _Origin, place: ast.expr, access: _Access) -> None:
        """Add an access to the uses of a path."""
        if isinstance(origin.source, ast.Constant):
            self._touch_literal(str(origin.source.value), access)
        else:
            self._touch_option(origin.source, place, access, is_below=origin.is_below)

    def _touch_literal(self, text: str, access: _Access) -> None:
        """Add a literal path to the texts. Text that does not look like a path is left out."""
        path = text.rstrip("/")
        is_folder = access.is_of_folders or text.endswith("/")
        if is_folder:
            path += "/"
        elif not _PATH.fullmatch(re.sub(r"(?<=\w) (?=\w)", "_", path)):
            return
        if access.reads:
            self.texts_read.append(path)
        elif self._off:
            self.texts_off.append(path)
        else:
            self.texts_written.append(path)

    def _touch_option(self, name: str, place: ast.expr, access: _Access, *, is_below: bool) -> None:
        touched = self.done.setdefault(name, _Touched())
        touched.read |= access.reads
        touched.written |= access.writes
        touched.made |= access.writes and not self._off
        touched.folder |= is_below or access.is_of_folders
        touched.model |= access.word == "from_pretrained"
        if access.writes and is_below:
            pattern = _pattern(self.written.get(_dotted_name(place), place))
            if pattern:
                touched.patterns.append(pattern)

    def _origin(self, node: ast.expr) -> _Origin | None:
        """Return the origin of a path expression; None for other expressions."""
        if isinstance(node, ast.Attribute):
            return self._origin_of_attribute(node)
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Constant):
            return _Origin(node) if isinstance(node.value, str) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return self._below(node.left, node.right)
        if isinstance(node, ast.JoinedStr):
            return self._origin_of_f_string(node)
        if isinstance(node, ast.Call):
            return self._origin_of_call(node)
        return None

    def _origin_of_attribute(self, node: ast.Attribute) -> _Origin | None:
        """Return the origin of `args.option`, of `path.parent` or of an alias."""
        if self._is_option(node):
            return _Origin(node.attr)
        if node.attr == "parent":
            origin = self._origin(node.value)
            if origin is not None:
                return origin
        return self.aliases.get(_dotted_name(node))

    def _is_option(self, node: ast.Attribute) -> bool:
        """Return True for an option's attribute.  Any variable may hold the parsed options."""
        if not isinstance(node.value, ast.Name) or node.value.id in _OTHER_OWNERS:
            return False
        return node.attr in self.names

    def _origin_of_f_string(self, node: ast.JoinedStr) -> _Origin | None:
        """Return the origin of an f-string whose first part is a variable."""
        if not node.values or not isinstance(node.values[0], ast.FormattedValue):
            return None
        start, rest = node.values[0].value, node.values[1:]
        origin = self._origin(start)
        is_literal = origin is not None and isinstance(origin.source, ast.Constant)
        text_after = text_of(rest[0]) if rest else ""
        # Only a slash after a literal directory makes a path below it.
        if is_literal and not text_after.startswith("/"):
            return None
        return self._below(start, *rest)

    def _origin_of_call(self, node: ast.Call) -> _Origin | None:
        """Return the origin of a call that makes a path, such as `os.path.join` or `Path`."""
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in _SAME and not node.args:
                return self._origin(node.func.value)
            if node.func.attr == "joinpath":
                return self._below(node.func.value, *node.args)
        if not node.args:
            return None
        word = name_of(node.func)
        is_joined = word == "Path" and len(node.args) > 1
        if is_joined or word == "join":
            return self._below(*node.args)
        return self._origin(node.args[0]) if word in _WRAPPERS else None

    def _below(self, node: ast.expr, *parts: ast.expr) -> _Origin | None:
        """Return the origin of a path joined from `node` and `parts`.

        For a literal directory, the origin is the joined path, or the directory if a part varies.
        """
        origin = self._origin(node)
        if origin is None:
            return None
        if not isinstance(origin.source, ast.Constant):
            return _Origin(origin.source, is_below=True)
        if origin.is_below:
            return origin  # the part below the directory varies
        folder = str(origin.source.value).rstrip("/")
        texts = [text_of(part).strip("/") for part in parts]
        if all(texts):
            return _Origin(ast.Constant("/".join([folder, *texts])))
        return _Origin(ast.Constant(f"{folder}/"), is_below=True)


def _access_by_open(node: ast.Call, owner: ast.expr | None) -> _Access:
    """Return the use of `open(path, mode)`, or of `path.open(mode)` with `path` as `owner`."""
    if owner is not None:
        places, others = [owner], node.args
    else:
        places, others = node.args[:1], node.args[1:]
    given = others[0] if others else keywords_of(node).get("mode")
    mode = text_of(given) if given is not None else "r"
    reads = set(mode).isdisjoint("wax")
    writes = not set(mode).isdisjoint("wax+")
    return _Access("open", reads, writes, places)


def _names_assigned_once(tree: ast.AST) -> set[str]:
    """Return the names that are assigned exactly once in a script and are not parameters."""
    counts: Counter[str] = Counter()
    parameters: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            parameters.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            counts[_dotted_name(node)] += 1
    once = {name for name, count in counts.items() if count == 1}
    # The name of other targets, such as `a[0]`, is empty.
    return once - parameters - {""}


def _dotted_name(node: ast.expr) -> str:
    """Return a variable's name, such as `out` or `self.out`; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if not isinstance(node, ast.Attribute):
        return ""
    is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
    return f"self.{node.attr}" if is_of_self else ""


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
    parts = ""
    for part in last.values:
        parts += str(part.value) if isinstance(part, ast.Constant) else "*"
    name = re.sub(r"\*+", "*", parts).strip("/").rpartition("/")[2]
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
    if _is_output(option, touched):
        role = _output_role(option, touched, is_tested=option.name in use.asked)
        return replace(option, role=role, folder=_has_folder(option, touched))
    if _is_model(option, touched):
        return replace(option, role="input", model=True)
    if touched.read or _is_data_path(option):
        return _as_data_input(option, touched)
    return option


def _is_output(option: Option, touched: _Touched) -> bool:
    """Return True if the script writes the path, or if its use is unknown and its name says so."""
    if touched.is_known:
        return touched.written
    return bool(option.words & _OUTPUT_WORDS)


def _is_model(option: Option, touched: _Touched) -> bool:
    """Return True if the script loads a model, or if the use is unknown and the name says so."""
    if touched.model or touched.is_known:
        return touched.model
    return option.name.lower() in _MODEL_NAMES


def _is_data_path(option: Option) -> bool:
    """Return True for a name of both data and a path, such as `train_file`."""
    return bool(option.words & _DATA_WORDS and option.words & _PATH_WORDS)


def _as_data_input(option: Option, touched: _Touched) -> Option:
    """Return the option as an input, with a guessed role if only a name without `file` or `dir`
    says so.
    """
    has_location = bool(option.words & _LOCATION_WORDS)
    folder = _has_folder(option, touched) or bool(option.words & _DATA_WORDS)
    is_guess = not touched.read and not has_location
    return replace(option, role="input", folder=folder, guessed=is_guess)


def _has_folder(option: Option, touched: _Touched) -> bool:
    """Return True if the script uses the option as a directory, or its name says so."""
    return touched.folder or bool(option.words & {"dir", "folder", "directory"})


def _is_state(option: Option, touched: _Touched) -> bool:
    """Return True if checkpoints are saved below the path, or the option's name says so."""
    if any(_STATE.match(pattern) for pattern in touched.patterns):
        return True
    if not _STATE.fullmatch(option.name.lower()):
        return False
    if touched.is_known:
        return touched.written
    return _has_folder(option, touched)


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
    if not option.empty:
        return "output"
    is_guess = not touched.is_known and not option.words & {"out", "output", "outputs"}
    return "off" if is_tested or is_guess else "output"
