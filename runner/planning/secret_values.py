"""The secrets of a plan: what they are set to in an environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..language.inputs import split_secrets
from ..secrets import SHORTEST, Secret, describe_unusable, is_tokenlike
from .plan import Plan
from .step import StepSpec


def secrets_set(spec: StepSpec, environ: Mapping[str, str]) -> list[Secret]:
    """The secrets of a step that are set, under the names that it finds them by."""
    return [
        Secret(each.variable, environ[each.source])
        for each in spec.secrets
        if environ.get(each.source)
    ]


def all_given(plan: Plan, environ: Mapping[str, str]) -> list[Secret]:
    """Those of all steps, under the names of the caller's variables.  What one step is given, another may print."""
    sources = {each.source for spec in plan.specs() for each in spec.secrets}
    return [Secret(source, environ[source]) for source in sorted(sources) if environ.get(source)]


class Passed(NamedTuple):
    """The variables that a step is given beside those of the login on its machine and its own `env`."""

    plain: Mapping[str, str]
    secrets: Sequence[Secret]


def variables_passed(
    spec: StepSpec, files: Mapping[str, str], environ: Mapping[str, str]
) -> Passed:
    """`files` is what its `env_file` holds.  A variable of the caller's that `pass_env` names comes before one of a file."""
    found = {**files, **{name: environ[name] for name in spec.pass_env if name in environ}}
    hidden = {name for name, value in found.items() if is_tokenlike(name, value)}
    plain = {name: value for name, value in found.items() if name not in hidden}
    return Passed(
        plain, [Secret(name, found[name]) for name in sorted(hidden) if name not in spec.env]
    )


def of_addresses(addresses: Iterable[str]) -> list[Secret]:
    """What opens them."""
    return [
        Secret("address", part)
        for address in addresses
        for part in split_secrets(address)[1]
        if len(part) >= SHORTEST
    ]


def faults(id: str, spec: StepSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each secret of a step whose value keeps it from running."""
    for _input, name, source, required in spec.secrets:
        if wrong := describe_unusable(source, environ.get(source), required=required):
            yield f"{id}: the secret {name}, which is ${source}, {wrong}"
