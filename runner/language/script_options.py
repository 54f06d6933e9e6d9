"""Read the argparse options of a Python script from its syntax, without running it.

Uncertain cases give no result: other parser libraries, computed option names, and parsers that
other code may extend.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .python_reader import last_name

_MANY: Final = 1 << 30
_CHANGING_METHODS: Final = frozenset({"append", "insert", "extend", "remove", "pop", "clear"})
_GROUPS: Final = frozenset({"add_argument_group", "add_mutually_exclusive_group"})
_UNCERTAIN_KEYWORDS: Final = frozenset({"parents", "prefix_chars", "fromfile_prefix_chars"})
_UNCERTAIN_CALLS: Final = frozenset(
    {"add_subparsers", "set_defaults", "CLI", "LightningCLI", "Fire"}
)
_PRIVATE_NAMES: Final = frozenset({"_actions", "_option_string_actions"})
_VALUES: Final = {"store": (1, 1), "append": (1, 1), "extend": (1, _MANY)}
_NARGS: Final = {"?": (0, 1), "+": (1, _MANY), "None": (1, 1)}
_CONDITIONAL: Final = (
    ast.IfExp,
    ast.BoolOp,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
"""Expressions whose parts may not be evaluated."""
_BARE: Final = frozenset(
    {"store_true", "store_false", "store_const", "append_const", "count", "help", "version"}
)


class ScriptOption(NamedTuple):
    """One command-line option of a script. Positional arguments have no `flags`."""

    name: str
    flags: tuple[str, ...]
    least: int
    most: int
    required: bool = False
    choices: tuple[str, ...] = ()
    number: str = ""  # int or float, if its values must be numbers


class ScriptOptions(NamedTuple):
    """All command-line options of a script. `strict` means that unknown options are rejected."""

    options: tuple[ScriptOption, ...]
    strict: bool = True
    abbreviations: bool = True

    @property
    def operands(self) -> tuple[ScriptOption, ...]:
        return tuple(option for option in self.options if not option.flags)

    def find(self, flag: str) -> ScriptOption | None:
        """Find an option by flag or unambiguous abbreviation, or return None."""
        for option in self.options:
            if flag in option.flags:
                return option
        if not flag.startswith("--") or not self.abbreviations:
            return None
        for option in self.options:
            if any(each.startswith(flag) for each in option.flags):
                return option
        return None


def options_of(entry: str, trees: Mapping[str, ast.Module]) -> ScriptOptions | None:
    """Return the argparse options of the script `entry`, or None if uncertain.

    `trees` has the syntax trees of the script and of all files that it imports, by path.
    """
    try:
        return _OptionCollector(entry, trees).read()
    except _Uncertain:
        return None


class _Uncertain(Exception):
    """Raised if a script's options are uncertain."""


class _Scope(NamedTuple):
    """A list of statements and its file."""

    file: str
    body: Sequence[ast.stmt]
    certain: bool  # whether they execute in every run of the script


class _OptionCollector:
    """Collector of a script's argparse options, following calls from function to function."""

    def __init__(self, entry: str, trees: Mapping[str, ast.Module]) -> None:
        self._entry, self._trees = entry, trees
        self._definitions = {file: _definitions(tree) for file, tree in trees.items()}
        self._modules = {file: _modules(tree) for file, tree in trees.items()}
        self._names = {file: _imported_names(tree) for file, tree in trees.items()}
        self._seen: dict[int, bool] = {}  # function id -> whether a call is certain
        self._options: dict[tuple[int, tuple[str, ...]], ScriptOption] = {}  # by call and names
        self._parsers: set[int] = set()
        self._waiting: list[_Scope] = []
        self._strict = self._abbreviations = True

    def read(self) -> ScriptOptions:
        """Return the script's options. Raises _Uncertain if uncertain."""
        for file, tree in self._trees.items():
            self._check_names(tree)
            self._waiting.append(_Scope(file, tree.body, True))
        for scope in self._waiting:  # grows
            self._read_block(scope.body, scope, {}, scope.certain)
        if len(self._parsers) != 1:
            raise _Uncertain
        return ScriptOptions(tuple(self._options.values()), self._strict, self._abbreviations)

    def _check_names(self, tree: ast.Module) -> None:
        """Raise _Uncertain if a file changes sys.argv or the private data of a parser."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _PRIVATE_NAMES:
                raise _Uncertain
            if any(_is_argv(each) or last_name(each) == "required" for each in _targets(node)):
                raise _Uncertain
            if isinstance(node, ast.Call) and _changes_argv(node.func):
                raise _Uncertain

    # -- statements --

    def _read_block(
        self, body: Sequence[ast.stmt], scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        for statement in body:
            self._read_statement(statement, scope, known, certain)

    def _read_statement(
        self, node: ast.stmt, scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        if isinstance(node, ast.If):
            self._read_condition(node, scope, known, certain)
        elif isinstance(node, ast.For):
            self._read_loop(node, scope, known, certain)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._read_expression(item.context_expr, scope, known, certain)
            self._read_block(node.body, scope, known, certain)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._read_expression(child, scope, known, certain)
                else:
                    self._read_uncertain(child, scope, known)

    def _read_uncertain(self, node: ast.AST, scope: _Scope, known: Mapping[str, str]) -> None:
        """Read code that may not execute, such as `while`, `try` or class bodies."""
        children = [node] if isinstance(node, ast.stmt) else ast.iter_child_nodes(node)
        for child in children:
            if isinstance(child, ast.stmt):
                self._read_statement(child, scope, known, False)
            elif isinstance(child, ast.expr):
                self._read_expression(child, scope, known, False)

    def _read_condition(
        self, node: ast.If, scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        if _is_main(node.test):
            if scope.file == self._entry:
                self._read_block(node.body, scope, known, certain)
            return
        if last_name(node.test) == "TYPE_CHECKING":
            return
        self._read_expression(node.test, scope, known, certain)
        self._read_block([*node.body, *node.orelse], scope, known, False)

    def _read_loop(
        self, node: ast.For, scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        self._read_expression(node.iter, scope, known, certain)
        turns = list(_find_loop_values(node))
        if not turns:
            self._read_block(node.body, scope, known, False)
        for turn in turns:
            self._read_block(node.body, scope, {**known, **turn}, certain)

    # -- expressions --

    def _read_expression(
        self, node: ast.expr, scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        if isinstance(node, ast.Call):
            self._read_call(node, scope, known, certain)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self._visit(self._resolve_name(node.id, scope.file), False)
        certain = certain and not isinstance(node, _CONDITIONAL)
        for part in _parts_of(node):
            self._read_expression(part, scope, known, certain)

    def _read_call(
        self, node: ast.Call, scope: _Scope, known: Mapping[str, str], certain: bool
    ) -> None:
        word = last_name(node.func)
        if word.endswith(("ArgumentParser", "ArgParser")):
            self._add_parser(node, scope.file)
        elif word == "add_argument":
            self._add_option(node, known, certain)
        elif word in _UNCERTAIN_CALLS:
            raise _Uncertain
        elif word.startswith("parse_known"):
            self._strict = False
        elif word.startswith("parse_") and word.endswith("args"):
            _check_parsed_words(node.args)
        elif word not in _GROUPS:
            self._follow_call(node, scope, certain)

    def _follow_call(self, node: ast.Call, scope: _Scope, certain: bool) -> None:
        """Visit all functions that a call may invoke."""
        found, sure = self._find_targets(node.func, scope.file)
        if not found and any(_is_parser(each, scope) for each in node.args):
            raise _Uncertain
        self._visit(found, certain and sure)

    def _add_parser(self, node: ast.Call, file: str) -> None:
        named = ast.unparse(node.func)
        module, _ = self._names[file].get(named, ("", ""))
        origin = module or named.rpartition(".")[0]
        given = {each.arg: each.value for each in node.keywords}
        has_unknown_keywords = None in given  # `**keywords` has no name
        if origin != "argparse" or has_unknown_keywords:
            raise _Uncertain
        if not _UNCERTAIN_KEYWORDS.isdisjoint(given):
            raise _Uncertain
        self._parsers.add(id(node))
        if _is_false(given.get("allow_abbrev")):
            self._abbreviations = False
        if not _is_false(given.get("add_help")):
            self._options[0, ()] = ScriptOption("--help", ("-h", "--help"), 0, 0)

    def _add_option(self, node: ast.Call, known: Mapping[str, str], certain: bool) -> None:
        given = {each.arg: each.value for each in node.keywords}
        if not node.args or None in given:
            raise _Uncertain
        names: list[str] = []
        for each in node.args:
            name = _evaluate_text(each, known)
            if name is None:
                raise _Uncertain
            if name:
                names.append(name)
        if not names:
            raise _Uncertain  # argparse refuses an empty name
        # A call in a loop adds an option in each turn; a call that is read twice adds one.
        self._options[id(node), tuple(names)] = _build_option(names, given, certain)

    # -- functions --

    def _find_targets(self, function: ast.expr, file: str) -> tuple[list[ast.AST], bool]:
        """Return the functions that a call may invoke, and whether the target is certain."""
        if isinstance(function, ast.Name):
            found = self._resolve_name(function.id, file)
            return found, len(found) == 1
        if not isinstance(function, ast.Attribute):
            return [], False
        owner = last_name(function.value)
        if owner in self._modules[file]:
            places = self._files_of(self._modules[file][owner])
            found = self._find_definitions(function.attr, places)
            return found, len(found) == 1
        # A method: its object may be of any class in these files, or of none.
        return self._find_definitions(function.attr, self._definitions), False

    def _resolve_name(self, name: str, file: str) -> list[ast.AST]:
        """Return the functions and classes to which a name in a file may refer."""
        own = self._definitions[file].get(name)
        if own:
            return list(own)
        if name not in self._names[file]:
            return []
        module, original = self._names[file][name]
        # Without a file of the module's name, the name may be from any of the files.
        places = self._files_of(module) or self._definitions
        return self._find_definitions(original, places)

    def _files_of(self, module: str) -> list[str]:
        """Return the files that may be a module, known by the last part of its name."""
        last = _last_part(module)
        return [file for file in self._definitions if _stem(file) == last]

    def _find_definitions(self, name: str, files: Iterable[str]) -> list[ast.AST]:
        """Return the functions and classes called `name` in some files."""
        found: list[ast.AST] = []
        for file in files:
            found += self._definitions[file].get(name, ())
        return found

    def _visit(self, found: Sequence[ast.AST], certain: bool) -> None:
        for definition in found:
            # A function is visited again only if this call is the first that is certain.
            known = self._seen.get(id(definition))
            if known or known is certain:
                continue
            self._seen[id(definition)] = certain
            if isinstance(definition, ast.ClassDef):
                methods = [each for each in definition.body if isinstance(each, ast.FunctionDef)]
                self._visit(methods, False)
            elif isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
                file = self._file_of(definition)
                self._waiting.append(_Scope(file, definition.body, certain))

    def _file_of(self, definition: ast.AST) -> str:
        """Return the first file with a function or class."""
        return next(file for file in self._definitions if self._defines(file, definition))

    def _defines(self, file: str, definition: ast.AST) -> bool:
        return any(definition in each for each in self._definitions[file].values())


# -- parts of a file --


def _definitions(tree: ast.Module) -> dict[str, list[ast.AST]]:
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.setdefault(node.name, []).append(node)
    return found


def _modules(tree: ast.Module) -> dict[str, str]:
    """Return imported names that are or may be modules, with full module names."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def _imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return the names from `from MODULE import NAME`, each with its module and original name."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""  # "" in `from . import a`
            for alias in node.names:
                found[alias.asname or alias.name] = module, alias.name
    return found


def _stem(file: str) -> str:
    """Return the last component of a file's module name."""
    return _last_part(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def _last_part(module: str) -> str:
    return module.rpartition(".")[2]


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield an expression, or the expressions inside a keyword, comprehension or slice."""
    if isinstance(node, ast.expr):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _expressions(child)


def _parts_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions inside an expression. The call `a.b(c)` has the parts `a` and `c`."""
    called = node.func if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node):
        for part in _expressions(child):
            if part is not called:
                yield part
            elif isinstance(part, ast.Attribute):
                yield part.value


def _is_main(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and "__main__" in ast.unparse(test)


def _is_argv(node: ast.AST) -> bool:
    """Return True if an expression is sys.argv or a part of it."""
    bare = node.value if isinstance(node, ast.Subscript) else node
    if not isinstance(bare, ast.Attribute):
        return False
    return bare.attr == "argv" and last_name(bare.value) == "sys"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _targets(node: ast.AST) -> Sequence[ast.expr]:
    """Return the targets of an assignment or deletion, or none for other nodes."""
    if isinstance(node, ast.AugAssign):
        return [node.target]
    return node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []


def _changes_argv(function: ast.expr) -> bool:
    """Return True if a called function changes sys.argv, for example `sys.argv.append`."""
    if not isinstance(function, ast.Attribute):
        return False
    return function.attr in _CHANGING_METHODS and _is_argv(function.value)


def _check_parsed_words(arguments: Sequence[ast.expr]) -> None:
    """Raise _Uncertain if a parser's method, such as `parse_args`, reads other words than sys.argv."""
    if arguments and not _is_command_line(arguments[0]):
        raise _Uncertain


def _is_command_line(node: ast.expr) -> bool:
    """Return True if an argument of `parse_args` is sys.argv, None or a variable."""
    if isinstance(node, ast.Constant):
        return node.value is None
    return _is_argv(node) or isinstance(node, ast.Name)


def _is_parser(node: ast.expr, scope: _Scope) -> bool:
    """Return True if a name is used as an argument parser in these statements."""
    if not isinstance(node, ast.Name):
        return False
    for statement in scope.body:
        for each in ast.walk(statement):
            if _is_parser_method(each, node.id):
                return True
    return False


def _is_parser_method(node: ast.AST, name: str) -> bool:
    """Return True if an expression is a parser's method of the object `name`."""
    if not isinstance(node, ast.Attribute) or last_name(node.value) != name:
        return False
    return node.attr.startswith("parse_") or node.attr in ("add_argument", *_GROUPS)


def _find_loop_values(node: ast.For) -> Iterator[dict[str, str]]:
    """Yield the text values of loop variables per iteration, or nothing for computed loops."""
    items = node.iter.elts if isinstance(node.iter, (ast.Tuple, ast.List)) else []
    for item in items:
        turn: dict[str, str] = {}
        pairs = [(node.target, item)]
        if isinstance(node.target, ast.Tuple) and isinstance(item, (ast.Tuple, ast.List)):
            pairs = list(zip(node.target.elts, item.elts, strict=False))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                text = _evaluate_text(value, {})
                if text is not None:
                    turn[target.id] = text
        yield turn


def _evaluate_text(node: ast.AST, known: Mapping[str, str]) -> str | None:
    """Return the value of a string constant, or None if the text is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.JoinedStr):
        return None
    parts: list[str] = []
    for each in node.values:
        part = _evaluate_part(each, known)
        if part is None:
            return None
        parts.append(part)
    return "".join(parts)


def _evaluate_part(part: ast.expr, known: Mapping[str, str]) -> str | None:
    """Return the text of an f-string part, or None if it is computed or formatted."""
    if not isinstance(part, ast.FormattedValue):
        return _evaluate_text(part, known)
    return None if part.format_spec else _evaluate_text(part.value, known)


# -- one option --


def _build_option(
    flags: Sequence[str], given: Mapping[str | None, ast.expr], certain: bool
) -> ScriptOption:
    least, most = _count_values(given)
    long_flags = [flag for flag in flags if flag.startswith("--")]
    name = long_flags[0] if long_flags else flags[0]
    names: list[str] = []
    if flags[0].startswith("-"):
        required = _is_true(given.get("required"))
        names += flags
        if _read_action(given) == "BooleanOptionalAction":
            names += [f"--no-{flag[2:]}" for flag in long_flags]
    else:
        required = least > 0
    number = last_name(given["type"]) if "type" in given else ""
    if number not in ("int", "float"):
        number = ""
    choices = _read_choices(given.get("choices"))
    return ScriptOption(name, tuple(names), least, most, certain and required, choices, number)


def _read_action(given: Mapping[str | None, ast.expr]) -> str:
    node = given.get("action")
    if node is None:
        return "store"
    if isinstance(node, ast.Constant):
        return str(node.value or "store")
    return last_name(node)


def _count_values(given: Mapping[str | None, ast.expr]) -> tuple[int, int]:
    """Return the minimum and maximum number of values of an argparse option.

    Raises _Uncertain for options that take the rest of the line.
    """
    action = _read_action(given)
    if action in _BARE or action == "BooleanOptionalAction":
        return 0, 0
    if action not in _VALUES:
        return 0, _MANY  # a custom action
    nargs = given.get("nargs")
    if nargs is None:
        return _VALUES[action]
    if not isinstance(nargs, ast.Constant):
        return 0, _MANY
    if isinstance(nargs.value, int):
        return nargs.value, nargs.value
    if nargs.value in ("...", "A..."):
        raise _Uncertain
    return _NARGS.get(str(nargs.value), (0, _MANY))


def _read_choices(node: ast.AST | None) -> tuple[str, ...]:
    """Return the choices of an option as text, or none if one of them is computed."""
    if not isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return ()
    values: list[str] = []
    for each in node.elts:
        if not isinstance(each, ast.Constant):
            return ()
        values.append(str(each.value))
    return tuple(values)
