"""The secrets of a plan: what they are set to in an environment.  Knows where secrets come from, not where they might be shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..language.inputs import divided
from ..secrets import SHORTEST, Secret, unusable
from .plan import Plan


def given(detail: Mapping[str, Any], environ: Mapping[str, str]) -> list[Secret]:
    """The secrets of a step that are set, under the names that it finds them by."""
    return [Secret(name, environ[source]) for _, name, source, _ in detail.get("secrets", ()) if environ.get(source)]


def all_given(plan: Plan, environ: Mapping[str, str]) -> list[Secret]:
    """Those of all steps, under the names of the caller's variables.  What one step is given, another may print."""
    sources = {source for detail in plan.details() for _, _, source, _ in detail.get("secrets", ())}
    return [Secret(source, environ[source]) for source in sorted(sources) if environ.get(source)]


def of_addresses(addresses: Iterable[str]) -> list[Secret]:
    """What opens them."""
    return [Secret("address", part) for address in addresses for part in divided(address)[1] if len(part) >= SHORTEST]


def faults(id: str, detail: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each secret of a step whose value keeps it from running."""
    for name, _, source, required in detail.get("secrets", ()):
        if wrong := unusable(source, environ.get(source), required=required):
            yield f"{id}: the secret {name}, which is ${source}, {wrong}"
