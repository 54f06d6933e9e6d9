"""Records of a finished attempt apart from its outputs: row, log, links and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from drivers.base import Exit

from ...storage.content.files import Content
from ...storage.content.objects import Objects
from ...storage.records import links
from ...storage.records.links import TrackerLink
from . import attempt_result
from .attempt import Attempt
from .chunks import Chunks
from .commit import GroupCommit
from .environments import StepEnvironments
from .tidying import AttemptCleanup
from .training_numbers import TrainingNumbers

NO_OUTPUTS: Final[Mapping[str, str]] = MappingProxyType({})


class AttemptRecords:
    """Writer of the database rows, logs, links and metrics of finished attempts."""

    def __init__(
        self,
        objects: Objects,
        commits: GroupCommit,
        environments: StepEnvironments,
        numbers: TrainingNumbers,
        chunks: Chunks,
        tidying: AttemptCleanup,
    ) -> None:
        self._objects, self._commits, self._environments = objects, commits, environments
        self._numbers, self._chunks, self._tidying = numbers, chunks, tidying

    def close_numbers(
        self, id: str, attempt: Attempt, last: Mapping[str, object] = MappingProxyType({})
    ) -> str:
        """Store the final metrics of an attempt, from `last` or from its metrics file.

        Returns a description of a loss that is NaN or infinite; empty if there was none.
        """
        return self._numbers.finish(id, attempt, last)

    def keep_log(self, id: str, attempt: Attempt) -> str:
        """Store the log and metrics files of an attempt and return the path of its log.

        The path is empty if the log is empty. Raises OSError.
        """
        log = self._tidying.copy_logs(id, attempt)
        self._chunks.finish(id, attempt)
        return log

    def links_of(
        self, id: str, attempt: Attempt, outputs: Mapping[str, str] = NO_OUTPUTS
    ) -> list[TrackerLink]:
        """Return links to dashboards with an attempt's metrics, such as TensorBoard.

        `outputs` are the contents of its outputs by name.
        """
        trees = {name: Content(content) for name, content in outputs.items() if content[0] == "t"}
        boards = [
            TrackerLink(id, "TensorBoard", f"{id}.{name}")
            for name, content in trees.items()
            if self._objects.manifests.mentions(content, links.EVENTS)
        ]
        paths = {
            output.name: output.path for output in attempt.node.outputs if output.name in trees
        }
        text = attempt_result.read_head_and_tail(attempt.log, self._commits.masker)
        return [*links.find_links(id, text, paths), *boards]

    def store(
        self,
        id: str,
        attempt: Attempt,
        outcome: str,
        reason: str,
        exit: Exit | None,
        *,
        links: list[TrackerLink],
        name: str = "",
        saved: bool = False,
    ) -> None:
        """Record the database row of an attempt.

        `name` is the current name of its directory.
        """
        self._commits.add_attempt(
            id,
            name or attempt.name,
            attempt.key,
            attempt.started,
            outcome,
            reason,
            attempt_result.preimage_of(attempt.spec, attempt.world),
            exit,
            self._environments.interpreter(attempt.node, attempt.spec, attempt.place),
            saved=saved,
            links=links,
        )

    def warnings_of(self, attempt: Attempt) -> list[str]:
        """Read the warnings that an attempt's step reported."""
        masker = self._commits.masker
        return attempt_result.read_warnings(attempt.directory.path, attempt.spec.metrics, masker)

    def facts_of(self, attempt: Attempt) -> dict[str, object]:
        """Return stored facts about an attempt outside its cache key, such as its host."""
        facts: dict[str, object] = {}
        environments, spec, place = self._environments, attempt.spec, attempt.place
        if place.elsewhere:
            facts["host"] = place.elsewhere
        image = environments.container_image(spec, place)
        if image:
            facts["image"] = environments.containers_of(place.members[0]).digest_of(image)
        elif environments.image(spec):
            facts["image"] = environments.image(spec)
        python = environments.interpreter(attempt.node, spec, place)
        if python:
            facts["python"] = python
        if attempt.resumed_step is not None:
            facts["continued_from"] = attempt.resumed_step
        if attempt.checkpoint_bytes:
            facts["checkpoint_bytes"] = attempt.checkpoint_bytes
        return facts
