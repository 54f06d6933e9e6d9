"""Value types of containers: the engine of a host, an image, a mount."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ENGINES = ("docker", "podman", "apptainer", "singularity", "enroot")
"""Programs to look for, in order of preference."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A container engine of a host, as found by `detect`."""

    kind: Literal["docker", "podman", "apptainer", "enroot"]
    program: str  # absolute path on the host
    version: str
    user: str  # UID:GID of the command in the container
    rootless: bool = False
    init: bool = False  # can start an init process that forwards signals and reaps zombies
    cards: int = 0  # GPUs of the host
    gpus: Literal["", "gpus", "cdi", "own"] = (
        ""  # flags that pass GPUs to a container; "own" for cluster engines, "" for none
    )
    memory: int = 0  # bytes of the host
    flags: tuple[str, ...] = ()  # `engine_args`, before the verb
    args: tuple[str, ...] = ()  # `container_args`, after `run`
    env: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # variables for the engine's client

    @property
    def words(self) -> tuple[str, ...]:
        return (self.program, *self.flags)


@dataclass(frozen=True, slots=True)
class Image:
    """An image on a host: the id to run, and the digest to record."""

    id: str
    digest: str


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path that is mounted in a container, at the same path or at `at`."""

    path: str
    writable: bool = False
    at: str = ""

    @property
    def target(self) -> str:
        """The path in the container."""
        return self.at or self.path
