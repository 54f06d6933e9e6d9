"""Expansion of the plan during a run: a pending matrix step becomes its instances."""

from __future__ import annotations

from collections.abc import Container

from ...planning.plan import Plan
from ...planning.secret_values import all_given
from ...storage.workspace import Workspace
from ...survey.facts import collect_facts
from ...survey.plan_cache import compile_request
from ...survey.survey import find_expansions
from ..tasks import tasks_of
from .commit import GroupCommit
from .publisher import Publisher
from .run_plan import RunPlan
from .run_schedule import RunSchedule
from .running_attempts import RunningAttempts


class PlanGrowth:
    """Handler that adds steps to the plan of a run in progress."""

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        running: RunningAttempts,
        publisher: Publisher,
    ) -> None:
        self._ws, self._steps, self._schedule = ws, steps, schedule
        self._commits, self._running, self._publisher = commits, running, publisher

    def add(self, ids: set[str]) -> None:
        """Add planned steps to the steps that the run executes."""
        steps = self._steps
        steps.add(ids)
        self._schedule.extend(tasks_of(steps.plan, ids, steps.todo, self._commits.expected))

    def grow(self) -> None:
        """Expand each pending matrix step whose input files are known.

        Raises RecipeError if the expanded plan is invalid.
        """
        survey, old = self._steps.survey, self._steps.plan
        if not old.pending:
            return
        grown = find_expansions(self._ws, old, self._steps.made)
        fresh = {name: files for name, files in grown.items() if name not in survey.globs}
        if not fresh:
            return
        survey.globs.update(fresh)
        plan = compile_request(self._ws, survey.source, survey.request, survey.globs)
        published_before = self._target_paths()
        self._replace(plan)
        known = {node.id for node in old.nodes}
        wanted = {plan.nodes[n].id for n in survey.select_wanted(plan)}
        new = wanted - known | wanted & survey.aside
        survey.aside -= new
        if survey.begin:
            survey.forced |= {plan.nodes[n].id for n in plan.after(plan.nodes_named(survey.begin))}
        self._commits.add_expansion(fresh, len(new))
        self.add(new | self._publish_new_targets(published_before) & wanted)

    def _target_paths(self) -> set[str]:
        targets = self._steps.survey.targets.values()
        return {path for each in targets for _, path in each}

    def _replace(self, plan: Plan) -> None:
        """Replace the plan by the expanded one, and collect facts about its files."""
        survey = self._steps.survey
        survey.targets = survey.targets_of(self._ws, plan)
        facts = collect_facts(self._ws, plan, survey.request)
        facts.there = dict(self._ws.cache.contents(self._target_paths()))
        facts.ours = self._ws.published_contents()
        self._steps.replace(plan, facts)
        self._running.renumber(plan)
        self._commits.masker.learn(all_given(plan, self._ws.environ))

    def _publish_new_targets(self, before: Container[str]) -> set[str]:
        """Publish outputs of finished steps at paths that the old plan did not publish.

        Returns the up-to-date steps with such outputs, which have to be added to the run.
        """
        steps, found = self._steps, set[str]()
        for n, targets in steps.survey.targets.items():
            made = steps.made.get(n)
            if made is None or not made.ok or steps.survey.library:
                continue
            if all(path in before for _, path in targets):
                continue
            id = steps.plan.nodes[n].id
            if id not in steps.todo:
                found.add(id)
                continue
            if error := self._publisher.try_publish(n, made):
                self._commits.say(f"{id}: {error}")
        return found
