"""Evaluate a training script's conditions with its option defaults, without running it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

_SIGNS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], object]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


class OptionAttributes(Protocol):
    """The option attributes required by `Defaults`."""

    @property
    def name(self) -> str: ...
    @property
    def default(self) -> str | None: ...
    @property
    def empty(self) -> bool: ...
    @property
    def required(self) -> bool: ...


class _Unknown(Exception):
    """Error for a value that is known only at run time."""


class Defaults:
    """Default values of options.

    `option_of` returns the origin of an expression, such as an option's name, and whether the
    expression is a path below the origin.
    """

    def __init__(
        self,
        options: Iterable[OptionAttributes],
        option_of: Callable[[ast.expr], tuple[Any, bool] | None],
    ) -> None:
        self._option_of = option_of
        self._known: dict[str, object] = {}
        for option in options:
            if option.default:
                self._known[option.name] = ast.literal_eval(option.default)
            elif option.empty:
                self._known[option.name] = None

    def holds(self, test: ast.expr) -> bool | None:
        """Evaluate a condition with the default values; None if unknown."""
        try:
            return bool(self._value(test))
        except (_Unknown, TypeError):
            return None

    def names_in(self, test: ast.expr) -> set[str]:
        """Return the names of the options in a condition."""
        names = {self._name(node) for node in ast.walk(test) if isinstance(node, ast.expr)}
        return names - {""}

    def _name(self, node: ast.expr) -> str:
        """Return the name of an option; empty for other expressions, such as a path below it."""
        if not isinstance(node, (ast.Attribute, ast.Name)):
            return ""
        found = self._option_of(node)
        if found is None:
            return ""
        origin, is_below = found
        return origin if isinstance(origin, str) and not is_below else ""

    def _value(self, node: ast.expr) -> Any:
        """Return the default value of an expression.  Raises _Unknown, TypeError."""
        if isinstance(node, ast.Constant):
            return node.value
        name = self._name(node)
        if name:
            return self._option_value(name)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand)
        if isinstance(node, ast.BoolOp):
            return self._connective(node)
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise _Unknown

    def _option_value(self, name: str) -> object:
        if name not in self._known:
            raise _Unknown
        return self._known[name]

    def _comparison(self, node: ast.Compare) -> Any:
        """Return the value of a comparison of two values."""
        operation = _SIGNS.get(type(node.ops[0]))
        if operation is None or len(node.ops) > 1:
            raise _Unknown
        return operation(self._value(node.left), self._value(node.comparators[0]))

    def _call(self, node: ast.Call) -> bool | int:
        """Return the value of `len(value)`, 0 for None, or of `bool(value)`."""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        if function not in ("len", "bool") or len(node.args) != 1:
            raise _Unknown
        value = self._value(node.args[0])
        if function == "bool":
            return bool(value)
        return len(value or "")

    def _connective(self, node: ast.BoolOp) -> bool:
        """Return the value of an `and` or `or` expression.

        One false part makes `and` false, even if others are unknown. One true part makes `or` true.
        """
        decides = isinstance(node.op, ast.Or)
        found = [self.holds(each) for each in node.values]
        if decides in found:
            return decides
        if None in found:
            raise _Unknown
        return not decides
