"""Propose the next input values of a search, with Optuna's tree-structured Parzen estimator.  Keeps no state between calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
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
    optuna = library()
    ways = {name: _distribution(optuna, axis) for name, axis in where.axes.items()}
    sampler = optuna.samplers.TPESampler(seed=seed * 100_003 + len(tried), constant_liar=True)
    study = optuna.create_study(direction="minimize" if least else "maximize", sampler=sampler)
    for trial in tried:
        if trial.result is not None:
            given = {
                name: _index(axis, value)
                for (name, axis), value in zip(where.axes.items(), trial.values, strict=True)
            }
            study.add_trial(
                optuna.trial.create_trial(params=given, distributions=ways, value=trial.result)
            )
    known = {_text(trial.values) for trial in tried}
    found: list[list[Tree]] = []
    chance = random.Random(seed + len(tried))  # noqa: S311 - not used for secrets
    for _ in range(int(min(count, where.size - len(known)))):
        for _ in range(_TRIES):
            asked = study.ask(ways).params
            point = [_value(axis, asked[name]) for name, axis in where.axes.items()]
            if _text(point) not in known:
                break
        while _text(point) in known:
            point = [_draw(axis, chance) for axis in where.axes.values()]
        known.add(_text(point))
        found.append(point)
    return found


def library() -> Any:
    """Import Optuna.  Raises CannotRun if Optuna is not installed."""
    try:
        import optuna
    except ImportError as error:
        from drivers import install_line

        raise CannotRun(f"--tpe requires {error.name}", fix=install_line("search")) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distribution(optuna: Any, axis: Range | Sequence[Tree]) -> Any:
    if not isinstance(axis, Range):
        # Use indices as categories, because Optuna rejects lists and objects.
        return optuna.distributions.CategoricalDistribution(tuple(range(len(axis))))
    if axis.whole:
        return optuna.distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _index(axis: Range | Sequence[Tree], value: Tree) -> Tree:
    return (
        value
        if isinstance(axis, Range)
        else next(n for n, each in enumerate(axis) if each == value)
    )


def _value(axis: Range | Sequence[Tree], drawn: float) -> Tree:
    if not isinstance(axis, Range):
        return axis[int(drawn)]
    return (
        int(drawn) if axis.whole else min(max(float(f"{drawn:.{_DIGITS}g}"), axis.low), axis.high)
    )


def _draw(axis: Range | Sequence[Tree], chance: random.Random) -> Tree:
    if not isinstance(axis, Range):
        return chance.choice(axis)
    return (
        chance.randint(int(axis.low), int(axis.high))
        if axis.whole
        else _value(axis, chance.uniform(axis.low, axis.high))
    )


def _text(values: Sequence[Tree]) -> str:
    return json.dumps(list(values))
