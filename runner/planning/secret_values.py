"""The secrets of a plan: what they are set to in an environment.  Knows where secrets come from, not where they might be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..language.inputs import divided
from ..secrets import SHORTEST, Secret, unusable
from .plan import Plan
from .step import StepSpec


def given(spec: StepSpec, environ: Mapping[str, str]) -> list[Secret]:
    """The secrets of a step that are set, under the names that it finds them by."""
    return [Secret(each.variable, environ[each.source]) for each in spec.secrets if environ.get(each.source)]


def all_given(plan: Plan, environ: Mapping[str, str]) -> list[Secret]:
    """Those of all steps, under the names of the caller's variables.  What one step is given, another may print."""
    sources = {each.source for spec in plan.specs() for each in spec.secrets}
    return [Secret(source, environ[source]) for source in sorted(sources) if environ.get(source)]


def of_addresses(addresses: Iterable[str]) -> list[Secret]:
    """What opens them."""
    return [Secret("address", part) for address in addresses for part in divided(address)[1] if len(part) >= SHORTEST]


def faults(id: str, spec: StepSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each secret of a step whose value keeps it from running."""
    for _input, name, source, required in spec.secrets:
        if wrong := unusable(source, environ.get(source), required=required):
            yield f"{id}: the secret {name}, which is ${source}, {wrong}"
