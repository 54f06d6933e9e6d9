"""Values of a plan's secrets, read from an environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..language.addresses import split_secrets
from ..secrets import SHORTEST, Secret, describe_unusable, is_tokenlike
from .plan import Plan
from .step import StepSpec


def find_secrets_set(spec: StepSpec, environ: Mapping[str, str]) -> list[Secret]:
    """Return the secrets of a step that are set in `environ`, by their names in the step."""
    return [
        Secret(each.variable, environ[each.source])
        for each in spec.secrets
        if environ.get(each.source)
    ]


def all_given(plan: Plan, environ: Mapping[str, str]) -> list[Secret]:
    """Return the secrets of all steps with a value in `environ`, by the caller's variable names.

    A step may print a secret of another step.
    """
    sources = {each.source for spec in plan.specs() for each in spec.secrets}
    return [Secret(source, environ[source]) for source in sorted(sources) if environ.get(source)]


class PassedVariables(NamedTuple):
    """Environment variables passed to a step from its caller and its `env_file`.

    The step's own `env` and the login environment of its machine are not included.
    """

    plain: Mapping[str, str]
    secrets: Sequence[Secret]


def variables_passed(
    spec: StepSpec, files: Mapping[str, str], environ: Mapping[str, str]
) -> PassedVariables:
    """Return the variables for a step from its `env_file` and from `pass_env`.

    `files` holds the variables of its `env_file`.  A variable of the caller in `pass_env` overrides
    these.
    """
    found = {**files, **{name: environ[name] for name in spec.pass_env if name in environ}}
    hidden = {name for name, value in found.items() if is_tokenlike(name, value)}
    plain = {name: value for name, value in found.items() if name not in hidden}
    return PassedVariables(
        plain, [Secret(name, found[name]) for name in sorted(hidden) if name not in spec.env]
    )


def secrets_of_addresses(addresses: Iterable[str]) -> list[Secret]:
    """Return the secret parts of URLs, such as passwords and tokens."""
    return [
        Secret("address", part)
        for address in addresses
        for part in split_secrets(address)[1]
        if len(part) >= SHORTEST
    ]


def faults(id: str, spec: StepSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each secret of a step with an unusable value."""
    for _input, name, source, required in spec.secrets:
        if wrong := describe_unusable(source, environ.get(source), required=required):
            yield f"{id}: the secret {name}, which is ${source}, {wrong}"
