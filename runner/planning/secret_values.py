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
    given = [each for each in spec.secrets if environ.get(each.source)]
    return [Secret(each.variable, environ[each.source]) for each in given]


def all_given(plan: Plan, environ: Mapping[str, str]) -> list[Secret]:
    """Return the secrets of all steps with a value in `environ`, by the caller's variable names.

    A step may print a secret of another step.
    """
    sources: set[str] = set()
    for spec in plan.specs():
        sources.update(each.source for each in spec.secrets)
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
    found = dict(files)
    for name in spec.pass_env:
        if name in environ:
            found[name] = environ[name]
    plain: dict[str, str] = {}
    hidden: dict[str, str] = {}
    for name, value in found.items():
        if is_tokenlike(name, value):
            hidden[name] = value
        else:
            plain[name] = value
    # The step's own `env` overrides a variable, whose value the step then never sees.
    names = sorted(hidden.keys() - spec.env.keys())
    return PassedVariables(plain, [Secret(name, hidden[name]) for name in names])


def secrets_of_addresses(addresses: Iterable[str]) -> list[Secret]:
    """Return the secret parts of URLs, such as passwords and tokens."""
    secrets: list[Secret] = []
    for address in addresses:
        _, parts = split_secrets(address)
        secrets += [Secret("address", part) for part in parts if len(part) >= SHORTEST]
    return secrets


def faults(id: str, spec: StepSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each secret of a step with an unusable value."""
    for _input, name, source, required in spec.secrets:
        wrong = describe_unusable(source, environ.get(source), required=required)
        if wrong:
            yield f"{id}: the secret {name}, which is ${source}, {wrong}"
