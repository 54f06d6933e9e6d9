"""The plan of a run as it stands: which steps are to run, how they were judged, what they made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...planning.judge import NOTHING, Facts, Made, Verdict
from ...planning.plan import LOCAL, Node, Plan
from ...planning.step import TEMPORARY, StepSpec
from ...storage.content.files import Content
from ...storage.content.objects import Objects
from ...survey.survey import Survey


class RunPlan:
    """The steps of one run, and what is known of each by now.

    `todo` are the steps of this run by their ids, `verdicts` their last verdicts.
    """

    def __init__(self, survey: Survey, known: Iterable[str] = ()) -> None:
        """`known`: steps that an earlier worker of the run had among its own."""
        self.survey = survey
        self.todo = {survey.plan.nodes[n].id for n in survey.todo} | set(known)
        self.verdicts = {id: survey.verdicts[survey.plan.index[id]] for id in self.todo}
        self._made = dict(survey.made)
        self._consumers: dict[int, list[str]] | None = None

    @property
    def plan(self) -> Plan:
        """The plan, which grows when the files of a pending matrix are known."""
        return self.survey.plan

    @property
    def facts(self) -> Facts:
        """What the survey saw of files, paths and traces."""
        return self.survey.facts

    @property
    def made(self) -> Mapping[int, Made]:
        """What steps have made so far, by number; one view for the whole run."""
        return self._made

    def number(self, id: str) -> int:
        """The number of a step in the plan of now."""
        return self.plan.index[id]

    def node(self, id: str) -> Node:
        """The node of a step."""
        return self.plan.nodes[self.plan.index[id]]

    def spec(self, id: str) -> StepSpec:
        """The command of a step, and all that it needs."""
        return self.plan.specs()[self.plan.index[id]]

    def is_local(self, id: str) -> bool:
        """Whether a step asks to run on this machine, whatever others there are."""
        return bool(self.node(id).flags & LOCAL)

    def set_made(self, n: int, made: Made) -> None:
        """Note what step number `n` made."""
        self._made[n] = made

    def set_failed(self, id: str) -> None:
        """Note that a step left nothing for others to take."""
        self._made[self.number(id)] = NOTHING

    def forget_made(self, n: int) -> None:
        """What step number `n` made is gone: it runs again."""
        self._made.pop(n)

    def judged(self, id: str, verdict: Verdict) -> None:
        """Note the verdict of a step."""
        self.verdicts[id] = verdict

    def consumers(self, n: int) -> Sequence[str]:
        """The steps of this run that need step number `n`."""
        if self._consumers is None:
            self._consumers = {}
            for id in self.todo:
                for need in self.plan.needs(self.plan.index[id]):
                    self._consumers.setdefault(need, []).append(id)
        return self._consumers.get(n, ())

    def add(self, ids: set[str]) -> None:
        """These steps are to run, too."""
        self.todo |= ids
        self._consumers = None

    def replace(self, plan: Plan, facts: Facts) -> None:
        """The plan has grown: what steps made is kept under their new numbers."""
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
        """Contents of `temporary` outputs of earlier runs that are not here: a host may have them."""
        found: set[str] = set()
        for node in [self.node(id) for id in self.todo]:
            names = {name for name, _, flags in node.outputs if flags & TEMPORARY}
            key = self.verdicts[node.id].key
            trace = self.facts.traces.get(key) if names and key is not None else None
            if trace is None:
                continue
            found |= {
                content
                for name, _, content in trace.outputs
                if name in names and not objects.has(Content(content))
            }
        return found
