"""What a step needs is final: must it run, or is its result here already?

Asks the planner, and notes the answer.
"""

from __future__ import annotations

from ...errors import RecipeError, StoreUnavailable
from ...hosts.pool import HostPool
from ...planning.judge import FRESH, NOTHING, RESTORE, Made, Verdict, judge
from ...planning.plan import SELECT
from ...planning.schedule import FINAL, State
from ...storage.content.files import Content
from ...storage.records.index import warnings_in
from ...storage.remote.cache import Downloads
from ...storage.workspace import Workspace
from .adjusting import SmallerInputs
from .commit import GroupCommit
from .failing import Cause
from .growth import PlanGrowth
from .publisher import Publisher
from .run_plan import RunPlan
from .run_schedule import RunSchedule


class Judge:
    """Judges the steps of one run, each when its needs are final.

    A step that cannot even be judged is refused: it fails when it is its turn to start.
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
        """`downloads` bring what the shared store has; None without one."""
        self._ws, self._steps, self._schedule, self._commits = ws, steps, schedule, commits
        self._publisher, self._smaller_inputs, self._growth = publisher, smaller_inputs, growth
        self._pool, self._downloads = pool, downloads
        self._refusals: dict[str, Cause] = {}
        self._waits_for: dict[str, set[str]] = {}  # steps found to have to run again, by consumer

    def judge_ready(self) -> bool:
        """Judge every step whose needs are final; True when something moved."""
        moved = False
        for id in self._schedule.ready():
            if self._is_waiting(id):
                continue
            self._judge(id)
            moved = True
        return moved

    def refuse(self, id: str, cause: Cause) -> None:
        """A step that is chosen to run fails when it is its turn."""
        self._refusals[id] = cause

    def refusal_of(self, id: str) -> Cause | None:
        """Why a step fails before it starts; None: it does not."""
        return self._refusals.get(id)

    def is_made(self, n: int) -> bool:
        """Whether a step that was to run need not any more."""
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
        self._steps.judged(id, verdict)
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
        """A need that was skipped, or that failed under an earlier worker, left nothing."""
        steps = self._steps
        for need in steps.plan.needs(steps.number(id)) - steps.made.keys():
            other = steps.plan.nodes[need].id
            if other in steps.todo and self._schedule.state(other) in (
                State.SKIPPED,
                State.FAILED,
            ):
                steps.set_made(need, NOTHING)

    def _verdict_after_earlier_attempts(self, id: str) -> Verdict:
        """The verdict of a step, with smaller inputs where it ran out of memory before."""
        n = self._steps.number(id)
        verdict = self._verdict(n)
        for _ in range(self._smaller_inputs.take_earlier(id)):
            if not self._smaller_inputs.are_used_by(id):
                self._steps.judged(id, verdict)
            if self._smaller_inputs.divide(id):
                verdict = self._verdict(n)
        return verdict

    def _verdict(self, n: int) -> Verdict:
        steps, survey = self._steps, self._steps.survey
        force = survey.forces(steps.plan.nodes[n].id)
        verdict = judge(steps.plan, n, steps.facts, steps.made, force=force, targets=survey.targets)
        if verdict.forced and verdict.key in self._commits.made:
            # This run has made it anew already.
            return judge(steps.plan, n, steps.facts, steps.made, targets=survey.targets)
        return verdict

    def _refuse_ready(self, id: str, cause: Cause) -> None:
        """A step that cannot even be judged fails, when it is its turn."""
        self.refuse(id, cause)
        self._schedule.judge(id, "run", "")

    # -- results that are there already

    def _reuse(self, id: str, verdict: Verdict, made: Made) -> None:
        """A step need not run, if the steps that need its result can have it."""
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
        if verdict.answer == RESTORE:
            try:
                self._publisher.publish(n, made)
            except StoreUnavailable:
                raise
            except RecipeError as error:
                return self._refuse_ready(id, Cause("publish", str(error), error.fix))
        reasons = "; ".join(verdict.reasons)
        self._schedule.judge(id, "fresh", reasons, self._facts_of_reuse(id, verdict))
        self._growth.grow()

    def _facts_of_reuse(self, id: str, verdict: Verdict) -> dict[str, object]:
        """What is stored of a step that need not run."""
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

    def _can_be_taken(self, n: int, made: Made) -> bool:
        """Whether the outputs that other steps take of step number `n` can be had."""
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
        """The outputs of a step that others of this run take."""
        return {
            each.output
            for id in self._steps.consumers(n)
            for each in self._steps.node(id).upstream
            if each.producer == n
        }

    # -- results that a shared store has

    def _is_waiting(self, id: str) -> bool:
        """Whether a step that could be judged waits for the shared store, or for another step."""
        if self._downloads is None:
            return False
        if self._downloads.is_awaited(id):
            return True
        # These were found to have to run again.
        others = self._waits_for.get(id, ())
        return any(self._schedule.state(other) not in FINAL for other in others)

    def _is_sent_for(self, downloads: Downloads, id: str, verdict: Verdict) -> bool:
        """Whether a step is judged again later.

        The shared store is asked for what it needs, or what made that runs again.
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
        """Contents that have to be here for a step, each with the number of the step that made it."""
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
        """What a step made cannot be had any more: it is judged again, and runs."""
        if id not in self._steps.todo:
            return self._growth.add({id})
        if self._schedule.state(id) in (State.FRESH, State.DONE):
            self._schedule.make_again(id, "its stored output was deleted")
            self._schedule.judge_again(id, "its dependencies may have to be copied")
