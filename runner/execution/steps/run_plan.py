"""Plan of a run during its execution: steps to run, verdicts and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...planning.judge import NOTHING, Facts, StepResult, Verdict
from ...planning.plan import LOCAL, Node, Plan
from ...planning.step import TEMPORARY, StepSpec
from ...storage.content.files import Content
from ...storage.content.objects import Objects
from ...survey.survey import Survey


class RunPlan:
    """Steps of one run with their verdicts and results.

    `todo` are the IDs of the steps to run, `verdicts` their latest verdicts.
    """

    def __init__(self, survey: Survey, known: Iterable[str] = ()) -> None:
        """Create the plan from `survey` and from `known`, the steps of an earlier worker."""
        self.survey = survey
        self.todo = {survey.plan.nodes[n].id for n in survey.todo} | set(known)
        self.verdicts = {id: survey.verdicts[survey.plan.index[id]] for id in self.todo}
        self._made = dict(survey.made)
        self._consumers: dict[int, list[str]] | None = None

    @property
    def plan(self) -> Plan:
        """Current plan, which grows when a pending matrix is expanded."""
        return self.survey.plan

    @property
    def facts(self) -> Facts:
        """Surveyed facts about files, paths and cached results."""
        return self.survey.facts

    @property
    def made(self) -> Mapping[int, StepResult]:
        """Results of finished steps by number, as a live view."""
        return self._made

    def number(self, id: str) -> int:
        """Return the number of a step in the current plan."""
        return self.plan.index[id]

    def node(self, id: str) -> Node:
        return self.plan.nodes[self.plan.index[id]]

    def spec(self, id: str) -> StepSpec:
        return self.plan.specs()[self.plan.index[id]]

    def is_local(self, id: str) -> bool:
        """Return True if the step is marked to run on this machine."""
        return bool(self.node(id).flags & LOCAL)

    def set_made(self, n: int, made: StepResult) -> None:
        self._made[n] = made

    def set_failed(self, id: str) -> None:
        """Mark a step as finished without a result."""
        self._made[self.number(id)] = NOTHING

    def forget_made(self, n: int) -> None:
        """Remove the lost result of step `n`, which runs again."""
        self._made.pop(n)

    def set_verdict(self, id: str, verdict: Verdict) -> None:
        self.verdicts[id] = verdict

    def consumers(self, n: int) -> Sequence[str]:
        """Return the steps of this run that depend on step `n`."""
        if self._consumers is None:
            self._consumers = {}
            for id in self.todo:
                for dependency in self.plan.dependencies(self.plan.index[id]):
                    self._consumers.setdefault(dependency, []).append(id)
        return self._consumers.get(n, ())

    def add(self, ids: set[str]) -> None:
        """Add planned steps to the steps to run."""
        self.todo |= ids
        self._consumers = None

    def replace(self, plan: Plan, facts: Facts) -> None:
        """Replace the plan by an expanded one, and move the results to the new step numbers."""
        old = self.plan
        made = {
            plan.index[old.nodes[n].id]: each
            for n, each in self._made.items()
            if old.nodes[n].id in plan.index
        }
        self._made.clear()
        self._made.update(made)
        self.survey.plan, self.survey.facts = plan, facts

    def left_on_hosts(self, objects: Objects) -> set[str]:
        """Return the contents of earlier `temporary` outputs that only a host may still have."""
        found: set[str] = set()
        for id in self.todo:
            contents = self._temporary_contents(self.node(id))
            found |= {content for content in contents if not objects.has(Content(content))}
        return found

    def _temporary_contents(self, node: Node) -> list[str]:
        """Return the contents of a step's `temporary` outputs in its cached result."""
        names = {name for name, _, flags in node.outputs if flags & TEMPORARY}
        key = self.verdicts[node.id].key
        if not names or key is None:
            return []
        trace = self.facts.traces.get(key)
        if trace is None:
            return []
        return [content for name, _, content in trace.outputs if name in names]
