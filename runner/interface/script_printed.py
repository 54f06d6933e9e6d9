"""Derive a metrics pattern from the print, logging and tqdm calls in a script's syntax tree,
without running the script.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from .script_syntax import calls_in, keywords_of, name_of, text_of

_MEASURE: Final = re.compile(r"loss|acc|perplexity|ppl|score|f1|bleu|error|reward")
_COUNTERS: Final = ("step", "epoch")
_NUMBER: Final = r"[-+.\deE]+|nan|-?inf"
_PRINTERS: Final = frozenset({"print", "info", "debug", "warning", "log", "write", "print_rank_0"})
_BARS: Final = frozenset({"set_description", "set_description_str", "set_postfix_str"})
_PERCENT_FIELD: Final = re.compile(
    r"%(?:\((\w+)\))?[-+ #0]*(?:\*|\d+)?(?:\.\d+)?([diouxXeEfFgGcrs%])"
)
_TRAINERS: Final = frozenset({"Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer"})

_Piece = str | ast.expr


def find_loss_pattern(tree: ast.AST) -> str | bool:
    """Return a regular expression for the script's printed loss line, or False if no such line is
    found.
    """
    best: tuple[int, str] = (0, "")
    for pieces in _lines(tree):
        pattern, names = _as_pattern(pieces)
        has_loss = any("loss" in name for name in names)
        if has_loss and len(names) > best[0]:
            best = (len(names), pattern)
    if best[1]:
        return best[1]
    if any(name_of(call.func) in _TRAINERS for call in calls_in(tree)):
        return rf"'loss': '?(?P<loss>{_NUMBER})"  # printed by the transformers trainers
    return False


def _lines(tree: ast.AST) -> Iterator[list[_Piece]]:
    """Yield the message of each print, logging and progress bar call, as literal texts and value
    expressions.
    """
    texts = _named_texts(tree)
    for call in calls_in(tree):
        word = name_of(call.func)
        if word in _PRINTERS or word in _BARS:
            args = call.args
            has_level = len(args) > 1 and not text_of(args[0])
            if word == "log" and has_level:
                args = args[1:]  # logging.log(level, text, …)
            yield _pieces_of_print(args, texts)
        elif word == "set_postfix":
            yield _postfix(call)


def _named_texts(tree: ast.AST) -> dict[str, ast.expr]:
    """Map each name assigned once to a text, such as `f"loss {loss}"`, or another constant to its
    expression.
    """
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
    texts = {}
    for name, (value, *more) in found.items():
        if not more and _pieces(value, {}) != [value]:
            texts[name] = value
    return texts


def _pieces_of_print(args: list[ast.expr], texts: dict[str, ast.expr]) -> list[_Piece]:
    """Split the printed arguments, which a space separates, or the %-format of a logging call."""
    if len(args) > 1:
        text = text_of(args[0])
        if _PERCENT_FIELD.search(text):
            return _pieces_of_percent(text, args[1:])
    pieces: list[_Piece] = []
    for n, arg in enumerate(args):
        if n > 0:
            pieces.append(" ")
        pieces += _pieces(arg, texts)
    return pieces


def _postfix(call: ast.Call) -> list[_Piece]:
    """Return the pieces of a tqdm postfix such as `loss=0.25, lr=0.001`."""
    names = sorted(keywords_of(call).keys() - {"refresh"})
    if call.args and isinstance(call.args[0], ast.Dict):
        # tqdm prints the dict in its order, then sorted keywords.
        names = [*map(text_of, call.args[0].keys), *names]
    pieces: list[_Piece] = []
    for name in filter(None, names):
        if pieces:
            pieces.append(", ")
        pieces += [f"{name}=", ast.Name(name)]
    return pieces


def _pieces(node: ast.expr, texts: dict[str, ast.expr]) -> list[_Piece]:
    """Split a text expression into literal texts and value expressions."""
    if isinstance(node, ast.Name) and node.id in texts:
        return _pieces(texts[node.id], {})
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return _pieces_of_fstring(node)
    if isinstance(node, ast.BinOp):
        return _pieces_of_operator(node, texts)
    if isinstance(node, ast.Call):
        return _pieces_of_call(node)
    return [node]


def _pieces_of_fstring(node: ast.JoinedStr) -> list[_Piece]:
    pieces: list[_Piece] = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            pieces.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            pieces.append(part.value)
    return pieces


def _pieces_of_operator(node: ast.BinOp, texts: dict[str, ast.expr]) -> list[_Piece]:
    """Split `text % values` and `text + text`; other operations are one value expression."""
    text = text_of(node.left)
    if isinstance(node.op, ast.Mod) and text:
        values = node.right.elts if isinstance(node.right, ast.Tuple) else [node.right]
        return _pieces_of_percent(text, values)
    if isinstance(node.op, ast.Add):
        left, right_pieces = _pieces(node.left, texts), _pieces(node.right, texts)
        if left != [node.left] or right_pieces != [node.right]:
            return left + right_pieces
    return [node]


def _pieces_of_call(node: ast.Call) -> list[_Piece]:
    """Split `text.format(…)`; `str(value)` is the value expression."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = text_of(node.func.value)
        if text:
            return _pieces_of_format(text, node)
    if name_of(node.func) == "str" and len(node.args) == 1:
        return [node.args[0]]
    return [node]


def _pieces_of_format(text: str, call: ast.Call) -> list[_Piece]:
    """Split `text.format(…)` into literal texts and value expressions."""
    named = keywords_of(call)
    pieces: list[_Piece] = []
    count = 0
    try:
        for before, name, _, _ in string.Formatter().parse(text):
            pieces.append(before)
            if name is None:
                continue
            head = re.split(r"[.\[]", name)[0]
            if not head:
                head, count = str(count), count + 1
            if head.isdecimal():
                pieces.append(_format_argument(call, int(head)))
            else:
                pieces.append(named.get(head, ast.Name(head)))
    except ValueError:
        return [call]
    return pieces


def _format_argument(call: ast.Call, n: int) -> ast.expr:
    """Return a positional argument, an empty text if it is missing, or an unnamed value for
    arguments that are unpacked from a list.
    """
    if n >= len(call.args):
        return ast.Constant("")
    value = call.args[n]
    return ast.Name("") if isinstance(value, ast.Starred) else value


def _pieces_of_percent(text: str, values: list[ast.expr]) -> list[_Piece]:
    """Split `text % values` into literal texts and value expressions."""
    pieces: list[_Piece] = []
    end = count = 0
    pairs = {}
    if len(values) == 1 and isinstance(values[0], ast.Dict):
        given = values[0]
        pairs = {text_of(key): value for key, value in zip(given.keys, given.values, strict=True)}
    for found in _PERCENT_FIELD.finditer(text):
        pieces.append(text[end : found.start()])
        end = found.end()
        if found[2] == "%":
            pieces.append("%")
        elif found[1]:
            pieces.append(pairs.get(found[1], ast.Name(found[1])))
        elif count < len(values):
            pieces.append(values[count])
            count += 1
        else:
            pieces.append(ast.Name(""))
    return [*pieces, text[end:]]


def _as_pattern(pieces: list[_Piece]) -> tuple[str, list[str]]:
    """Return a regular expression for a printed line, and the names of its metrics."""
    pattern, names, before = "", list[str](), ""
    # An empty piece would hide the label of the value after it.
    pieces = [piece for piece in pieces if piece != ""]
    for piece, following in zip_longest(pieces, pieces[1:], fillvalue=""):
        if isinstance(piece, str):
            before = piece
            pattern += _text_pattern(piece)
            continue
        after = following if isinstance(following, str) else ""
        name = _metric_name(piece, before)
        if name not in names and _is_metric(name, before, after):
            names.append(name)
            number = r"\d+" if name in _COUNTERS else _NUMBER
            pattern += rf"\s*(?P<{name}>{number})"
            before = ""
        else:
            pattern += r"\s*\S+?" if after[:1].strip() else r"\s*\S+"
    return re.sub(r"(\\s\*)+", r"\\s*", pattern).removeprefix(r"\s*").removesuffix(r"\s*"), names


def _text_pattern(text: str) -> str:
    """Return a pattern for a literal text in which any white space matches."""
    return r"\s*".join(re.escape(word) for word in re.split(r"\s+", text))


def _metric_name(value: ast.expr, before: str) -> str:
    """Return the label of a printed value, the last word of the text `before`, or its variable.

    The metric of `val_loss {val}` is val_loss. `step {step} of {steps}` has no metric `of`.
    """
    variable = _variable_name(value).lower()
    labels = re.findall(r"([A-Za-z_]\w*)\W*$", before)
    label = labels[0].lower() if labels else ""
    if not variable or variable in label.split("_"):
        return label
    if label in _COUNTERS or _MEASURE.search(label):
        return label
    return variable


def _is_metric(name: str, before: str, after: str) -> bool:
    """Return True if the value between two texts is a metric.

    Neither number of `9/10` is a metric, and `ms/batch 5` has no metric `batch`.
    """
    if not name.isidentifier() or len(name) < 2:
        return False
    if name in _COUNTERS:
        return True
    is_in_fraction = after.lstrip().startswith("/") or before.rstrip().endswith("/")
    is_rate = re.search(r"/\w+\W*$", before) is not None
    return not is_in_fraction and not is_rate


def _variable_name(node: ast.expr) -> str:
    """Return the last name of an expression such as `self.loss.item()`; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in (
            "item", "mean", "get_last_lr", "detach", "cpu",
        ):  # fmt: skip
            return _variable_name(node.func.value)
        if name_of(node.func) in ("float", "round") and node.args:
            return _variable_name(node.args[0])
    return ""
