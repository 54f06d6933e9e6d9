"""Propose the next input values of a search, with Optuna's tree-structured Parzen estimator.

Keeps no state between calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..api.sweeps import Range, Space
from ..errors import CannotRun

if TYPE_CHECKING:
    from ..language.values import Tree

_TRIES: Final = 20
"""Maximum repeated proposals in a row, before a random untried combination is drawn."""
_DIGITS: Final = 4
"""Significant digits of a proposed float."""


class Trial(NamedTuple):
    """A combination of values, in the order of the axes, with its result; None if the trial failed or has not finished."""

    values: Sequence[Tree]
    result: float | None


def propose(
    where: Space, tried: Sequence[Trial], count: int, *, least: bool, seed: int
) -> list[list[Tree]]:
    """Propose up to `count` untried combinations; fewer if the search space is exhausted.  Deterministic.  Raises CannotRun without Optuna."""
    study = _load_study(where, tried, least=least, seed=seed)
    known = {_text(trial.values) for trial in tried}
    found: list[list[Tree]] = []
    chance = random.Random(seed + len(tried))  # noqa: S311 - not used for secrets
    for _ in range(int(min(count, where.size - len(known)))):
        point = _ask_untried(study, where, known)
        while point is None or _text(point) in known:
            point = [_draw(axis, chance) for axis in where.axes.values()]
        known.add(_text(point))
        found.append(point)
    return found


def _load_study(where: Space, tried: Sequence[Trial], *, least: bool, seed: int) -> Any:
    """Return an Optuna study of the search space with the finished trials."""
    optuna = library()
    ways = _distributions(optuna, where)
    # A later call has more trials and so another seed, because the same seed would propose the
    # same values.  `constant_liar` lets the proposals of one call differ from each other.
    sampler = optuna.samplers.TPESampler(seed=seed * 100_003 + len(tried), constant_liar=True)
    direction = "minimize" if least else "maximize"
    study = optuna.create_study(direction=direction, sampler=sampler)
    for trial in tried:
        if trial.result is None:
            continue
        pairs = zip(where.axes.items(), trial.values, strict=True)
        given = {name: _index(axis, value) for (name, axis), value in pairs}
        frozen = optuna.trial.create_trial(params=given, distributions=ways, value=trial.result)
        study.add_trial(frozen)
    return study


def _ask_untried(study: Any, where: Space, known: Collection[str]) -> list[Tree] | None:
    """Return Optuna's next proposal that is not in `known`; None after `_TRIES` repeated proposals."""
    ways = _distributions(library(), where)
    for _ in range(_TRIES):
        asked = study.ask(ways).params
        point = [_value(axis, asked[name]) for name, axis in where.axes.items()]
        if _text(point) not in known:
            return point
    return None


def library() -> Any:
    """Import Optuna.  Raises CannotRun if Optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        from drivers import install_line

        raise CannotRun(f"--tpe requires {error.name}", fix=install_line("search")) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distributions(optuna: Any, where: Space) -> dict[str, Any]:
    return {name: _distribution(optuna, axis) for name, axis in where.axes.items()}


def _distribution(optuna: Any, axis: Range | Sequence[Tree]) -> Any:
    if not isinstance(axis, Range):
        # Use indices as categories, because Optuna rejects lists and objects.
        return optuna.distributions.CategoricalDistribution(tuple(range(len(axis))))
    if axis.whole:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _index(axis: Range | Sequence[Tree], value: Tree) -> Tree:
    if isinstance(axis, Range):
        return value
    return next(n for n, each in enumerate(axis) if each == value)


def _value(axis: Range | Sequence[Tree], drawn: float) -> Tree:
    if not isinstance(axis, Range):
        return axis[int(drawn)]
    if axis.whole:
        return int(drawn)
    rounded = float(f"{drawn:.{_DIGITS}g}")
    return min(max(rounded, axis.low), axis.high)


def _draw(axis: Range | Sequence[Tree], chance: random.Random) -> Tree:
    if not isinstance(axis, Range):
        return chance.choice(axis)
    if axis.whole:
        return chance.randint(int(axis.low), int(axis.high))
    return _value(axis, chance.uniform(axis.low, axis.high))


def _text(values: Sequence[Tree]) -> str:
    return json.dumps(list(values))
