"""Publication of outputs at the user's paths, without replacing manually edited files."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import CannotRun, RecipeError, StoreUnavailable
from ...hosts.place.spare_dirs import SparePool
from ...planning.judge import StepResult
from ...planning.step import TEMPORARY
from ...storage.content.files import Content
from ...storage.workspace import Workspace
from ...survey.survey import Survey
from .commit import GroupCommit


class Publisher:
    """Publisher of one run's outputs in the workspace."""

    def __init__(
        self,
        ws: Workspace,
        survey: Survey,
        commits: GroupCommit,
        scrap: SparePool,
        *,
        overwrite: bool,
        link: bool,
    ) -> None:
        self.ws, self.survey, self.commits, self.scrap, self.overwrite, self.link = (
            ws,
            survey,
            commits,
            scrap,
            overwrite,
            link,
        )
        self._top = str(ws.root)

    def check_targets(self, n: int) -> None:
        """Raise CannotRun if step `n` would replace a file that recipe did not create.

        Does nothing with `overwrite`.
        """
        if self.overwrite:
            return
        for _, path in self.survey.targets.get(n, ()):
            if self.survey.facts.strange(path):
                from ...survey.explain import describe_replaced

                (words,) = describe_replaced(self.ws, [path])
                raise CannotRun(
                    f"the step would replace {words}",
                    fix="move the file away, pass `--overwrite`, or accept it with `recipe adopt`",
                )

    def try_publish(self, n: int, made: StepResult) -> RecipeError | None:
        """Publish the outputs of step `n`, and return the error if the step cannot be published.

        Raises StoreUnavailable, because a later attempt can succeed.
        """
        try:
            self.publish(n, made)
        except StoreUnavailable:
            raise
        except RecipeError as error:
            return error
        return None

    def publish(self, n: int, made: StepResult) -> None:
        """Publish the outputs of step `n` in the workspace.

        Raises CannotRun if a target was edited by hand, and Infrastructure.
        """
        facts = self.survey.facts
        flags = {output.name: output.flags for output in self.survey.plan.nodes[n].outputs}
        for output, path in self.survey.targets.get(n, ()):
            content = made.outputs.get(output)
            if content is None or flags.get(output, 0) & TEMPORARY:
                continue
            if facts.there.get(path) == content:
                if (
                    facts.ours.get(path) != content
                ):  # published by a worker that died before storing the result
                    self.commits.add_published(path, content, self.survey.plan.nodes[n].id)
                    facts.ours[path] = content
                continue
            if not self.overwrite:
                there = os.path.lexists(path if path[0] == "/" else f"{self._top}/{path}")
                facts.there[path] = self.ws.cache.content_of(path) if there else None
                if facts.strange(path):
                    why = f"{path} was created or edited while the step ran, and was not replaced"
                    raise CannotRun(
                        why,
                        fix="move the file away, pass `--overwrite`, or accept it with `recipe adopt`",
                    )
            self.ws.publish(Content(content), path, link=self.link, spare=self.scrap.take_file)
            self.commits.add_published(path, content, self.survey.plan.nodes[n].id)
            facts.there[path] = facts.ours[path] = content

    def publish_all(self, made: Mapping[int, StepResult]) -> None:
        """Publish all outputs of a library recipe, at the end of the run."""
        for n in self.survey.targets:
            if n in made and made[n].ok:
                self.publish(n, made[n])
