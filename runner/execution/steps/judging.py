"""Verdicts on steps whose dependencies are finished: run, reuse the cached result, or skip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RecipeError, StoreUnavailable
from ...hosts.pool import HostPool
from ...planning.judge import FRESH, NOTHING, RESTORE, StepResult, Verdict, judge
from ...planning.plan import SELECT
from ...planning.schedule import FINAL, State
from ...storage.content.files import Content
from ...storage.records.index import warnings_in
from ...storage.workspace import Workspace
from .adjusting import SmallerInputs
from .commit import GroupCommit
from .failing import Cause
from .growth import PlanGrowth
from .publisher import Publisher
from .run_plan import RunPlan
from .run_schedule import RunSchedule

if TYPE_CHECKING:
    from ...storage.remote.cache import Downloads


class Judge:
    """Cache check for each step of a run, once its dependencies are finished.

    A step that cannot be checked is refused: it fails when it would start.
    """

    def __init__(
        self,
        ws: Workspace,
        steps: RunPlan,
        schedule: RunSchedule,
        commits: GroupCommit,
        publisher: Publisher,
        smaller_inputs: SmallerInputs,
        growth: PlanGrowth,
        pool: HostPool,
        downloads: Downloads | None,
    ) -> None:
        """Create the judge of one run.

        `downloads` fetches shared results; None without a shared store.
        """
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._publisher, self._smaller_inputs, self._growth = publisher, smaller_inputs, growth
        self._pool, self._downloads = pool, downloads
        self._refusals: dict[str, Cause] = {}
        self._waits_for: dict[str, set[str]] = {}  # producers that run again, by waiting step

    def judge_ready(self) -> bool:
        """Check the cache for every step with finished dependencies.

        Return True if a step was checked.
        """
        moved = False
        for id in self._schedule.ready():
            if self._is_waiting(id):
                continue
            self._judge(id)
            moved = True
        return moved

    def refuse(self, id: str, cause: Cause) -> None:
        """Mark a step so that it fails with `cause` when it would start."""
        self._refusals[id] = cause

    def refusal_of(self, id: str) -> Cause | None:
        """Return the cause that makes a step fail before it starts; None if there is none."""
        return self._refusals.get(id)

    def is_made(self, n: int) -> bool:
        """Return True if the step has a usable cached result by now and need not run."""
        verdict = self._verdict(n)
        if verdict.answer not in (FRESH, RESTORE) or verdict.made is None:
            return False
        return self._can_be_taken(n, verdict.made)

    # -- one step

    def _judge(self, id: str) -> None:
        self._note_needs_without_result(id)
        try:
            verdict = self._verdict_after_earlier_attempts(id)
        except StoreUnavailable:
            raise
        except RecipeError as error:
            return self._refuse_ready(id, Cause("when", str(error), error.fix))
        self._steps.set_verdict(id, verdict)
        if self._downloads is not None and self._is_sent_for(self._downloads, id, verdict):
            return None
        reasons = "; ".join(verdict.reasons)
        if verdict.answer in (FRESH, RESTORE):
            assert verdict.made is not None
            return self._reuse(id, verdict, verdict.made)
        if verdict.answer == "skip":
            self._steps.set_failed(id)
            return self._schedule.judge(id, "skip", reasons)
        if self._steps.node(id).flags & SELECT:
            return self._refuse_ready(id, Cause("select", reasons))
        return self._schedule.judge(id, "run", reasons)

    def _note_needs_without_result(self, id: str) -> None:
        """Mark dependencies that were skipped or failed as steps without a result."""
        steps = self._steps
        for dependency in steps.plan.dependencies(steps.number(id)) - steps.made.keys():
            other = steps.plan.nodes[dependency].id
            if other in steps.todo and self._schedule.state(other) in (
                State.SKIPPED,
                State.FAILED,
            ):
                steps.set_made(dependency, NOTHING)

    def _verdict_after_earlier_attempts(self, id: str) -> Verdict:
        """Return the verdict of a step, with smaller inputs if it ran out of memory before."""
        n = self._steps.number(id)
        verdict = self._verdict(n)
        for _ in range(self._smaller_inputs.take_earlier(id)):
            if not self._smaller_inputs.are_used_by(id):
                self._steps.set_verdict(id, verdict)
            if self._smaller_inputs.divide(id):
                verdict = self._verdict(n)
        return verdict

    def _verdict(self, n: int) -> Verdict:
        steps, survey = self._steps, self._steps.survey
        force = survey.forces(steps.plan.nodes[n].id)
        verdict = judge(steps.plan, n, steps.facts, steps.made, force=force, targets=survey.targets)
        if verdict.forced and verdict.key in self._commits.made:
            # This run has already repeated the step.
            return judge(steps.plan, n, steps.facts, steps.made, targets=survey.targets)
        return verdict

    def _refuse_ready(self, id: str, cause: Cause) -> None:
        """Queue a READY step that will fail with `cause` when it would start."""
        self.refuse(id, cause)
        self._schedule.judge(id, "run", "")

    # -- existing results

    def _reuse(self, id: str, verdict: Verdict, made: StepResult) -> None:
        """Reuse the cached result of a step, or run the step if a required output is missing."""
        n = self._steps.number(id)
        if not self._can_be_taken(n, made):
            gone = "its stored output was deleted"
            runs = Verdict("run", verdict.key, (gone,), None)
            if self._downloads is None or not self._is_sent_for(self._downloads, id, runs):
                self._schedule.judge(id, "run", gone)
            return
        self._steps.set_made(n, made)
        if self._smaller_inputs.are_used_by(id) and verdict.key is not None:
            trace = self._ws.store.index.trace(verdict.key)
            if trace is not None:
                self._smaller_inputs.note_result(id, trace)
        if verdict.answer == RESTORE and (error := self._publisher.try_publish(n, made)):
            return self._refuse_ready(id, Cause("publish", str(error), error.fix))
        reasons = "; ".join(verdict.reasons)
        self._schedule.judge(id, "fresh", reasons, self._facts_of_reuse(id, verdict))
        self._growth.grow()

    def _facts_of_reuse(self, id: str, verdict: Verdict) -> dict[str, object]:
        """Return the facts stored with the event of a reused result."""
        facts: dict[str, object] = {}
        if verdict.answer == RESTORE:
            facts["restored"] = True
        metrics = self._steps.spec(id).metrics
        if metrics is not None and metrics.in_environment and verdict.key is not None:
            trace = self._ws.store.index.trace(verdict.key)
            warnings = warnings_in(trace) if trace is not None else ()
            if warnings:
                facts["warnings"] = warnings
        return facts

    def _can_be_taken(self, n: int, made: StepResult) -> bool:
        """Return True if all outputs of step `n` that other steps need are available."""
        taken = self._outputs_taken(n)
        contents = [made.outputs[name] for name in taken if name in made.outputs]
        return all(self._can_be_had(Content(content)) for content in contents)

    def _can_be_had(self, content: Content) -> bool:
        cache = self._ws.remote_cache
        if cache is not None and self._ws.delivers and cache.has(content):
            return True
        if self._ws.objects.has(content):
            return True
        return any(place.folder.holds(content) for place in self._pool.places)

    def _outputs_taken(self, n: int) -> set[str]:
        """Return the names of step `n`'s outputs that other steps of this run need."""
        taken = set()
        for id in self._steps.consumers(n):
            taken |= {each.output for each in self._steps.node(id).upstream if each.producer == n}
        return taken

    # -- results in a shared store

    def _is_waiting(self, id: str) -> bool:
        """Return True if a step waits for the shared store, or for a dependency that runs again."""
        if self._downloads is None:
            return False
        if self._downloads.is_awaited(id):
            return True
        # Producers that run again.
        others = self._waits_for.get(id, ())
        return any(self._schedule.state(other) not in FINAL for other in others)

    def _is_sent_for(self, downloads: Downloads, id: str, verdict: Verdict) -> bool:
        """Request missing contents for a step; return True if it must be checked again later.

        Contents come from the shared store, or the step that produced them runs again.
        """
        steps = self._steps
        producers = self._contents_needed(id, verdict)
        contents = [Content(content) for content in producers]
        missing = [content for content in contents if not self._ws.objects.has(content)]
        if downloads.ask(id, steps.node(id), verdict, missing):
            return True
        if verdict.made is not None:
            missing = []
        lost = {steps.plan.nodes[producers[content]].id for content in missing}
        for producer in lost:
            self._make_again(producer)
        self._waits_for[id] = lost
        return bool(lost)

    def _contents_needed(self, id: str, verdict: Verdict) -> dict[str, int]:
        """Return the content digests that a step needs on this machine, by producing step.

        The result maps each digest to the number of its producer.
        """
        steps, n = self._steps, self._steps.number(id)
        if verdict.made is not None:
            outputs = verdict.made.outputs
            published = {
                output
                for output, path in steps.survey.targets.get(n, ())
                if steps.facts.there.get(path) != outputs.get(output)
            }
            names = published | self._outputs_taken(n)
            return {outputs[name]: n for name in names if name in outputs}
        if verdict.answer != "run":
            return {}
        contents: dict[str, int] = {}
        for each in steps.node(id).upstream:
            content = steps.made[each.producer].outputs.get(each.output)
            if content is not None:
                contents[content] = each.producer
        return contents

    def _make_again(self, id: str) -> None:
        """Run a step again, because its stored output was deleted."""
        if id not in self._steps.todo:
            return self._growth.add({id})
        if self._schedule.state(id) in (State.FRESH, State.DONE):
            self._schedule.make_again(id, "its stored output was deleted")
            self._schedule.judge_again(id, "its dependencies may have to be copied")
