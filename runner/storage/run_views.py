"""Views of a store's runs: reads rows and passes them to `planning.run_view`.

Read-only, and opens no attempt files.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ..planning.run_view import NOTHING, WEIGHED, PlannedSteps, RunView, fold
from .records.ledger import Ledger, of_user
from .records.runs import Event, RunRow, StepRow
from .records.store import Store
from .run_graph import RunGraph, recall

_ENDED_WELL: Final = "COMPLETED"


class RunViews:
    """Reader of run views from a workspace's store.

    Obtained from `Workspace.run_views`.
    """

    def __init__(self, store: Store, environ: Mapping[str, str]) -> None:
        self._store, self._environ = store, environ

    def graph(self, row: RunRow) -> RunGraph | None:
        """Return the step graph of a run, or None.

        Returns None if the graph is on another machine or the run has not started.
        """
        return recall(self._store.root, row.id)

    def of(self, row: RunRow) -> RunView:
        """Return the full view of a run, including its steps."""
        return self.view(row, self.graph(row))

    def view(self, row: RunRow, graph: RunGraph | None) -> RunView:
        """Return the full view of a run whose graph is already loaded."""
        runs = self._store.runs
        return self._fold(row, graph, runs.steps(row.id), runs.step_moves(row.id))

    def summaries(self, rows: Sequence[RunRow]) -> list[RunView]:
        """Return views of runs without step events (attempts, hosts, log ends).

        Views of large runs also have no steps.
        """
        runs = self._store.runs
        tallies = runs.tallies([row.id for row in rows])
        small = [id for id, tally in tallies.items() if sum(tally.values()) <= WEIGHED]
        steps = runs.steps_of(small)
        views = []
        for row in rows:
            graph = self.graph(row)
            if row.id in steps:
                views.append(self._fold(row, graph, steps[row.id]))
            else:
                views.append(self._fold(row, graph, {}, others=tallies[row.id]))
        return views

    def _fold(
        self,
        row: RunRow,
        graph: RunGraph | None,
        steps: Mapping[str, StepRow],
        moves: Sequence[Event] = (),
        others: Mapping[tuple[str, str], int] = NOTHING,
    ) -> RunView:
        planned = planned_of(row, graph)
        begun = row.state == "ACTIVE" or (row.state == "QUEUED" and bool(row.claim))
        live = begun and self._store.runs.live(row.id)
        return fold(
            row,
            steps,
            moves,
            now=time.time(),
            planned=planned,
            expected=self._expected_seconds(row, steps, planned),
            leases=self._leases(row.id) if live else (),
            live=live,
            others=others,
        )

    def _expected_seconds(
        self, row: RunRow, steps: Mapping[str, StepRow], planned: PlannedSteps
    ) -> Mapping[str, float]:
        """Return the expected durations of a run's steps in seconds, by step.

        They come from earlier runs.
        """
        if row.state == _ENDED_WELL:
            return {}
        # The instances of a matrix step have ids of their own, known only from their rows.
        single = [step for step, count in planned.instances.items() if count == 1]
        return self._store.index.expected_seconds(row.recipe, dict.fromkeys([*steps, *single]))

    def _leases(self, run: str) -> Collection[str]:
        """Return the states of the run's rented machines."""
        with Ledger.open(of_user(self._environ), read_only=True) as ledger:
            return {lease.state for lease in ledger.of_run(run)}


def planned_of(row: RunRow, graph: RunGraph | None) -> PlannedSteps:
    """Return the planned steps of a run from its graph.

    Returns only their counts if the graph is on another machine.
    """
    total, fresh = row.data.get("total"), row.data.get("fresh")
    if graph is not None:
        total = sum(graph.instances.values())
        return PlannedSteps(graph.instances, graph.fresh, total, 0, graph.trains, graph.reported)
    if isinstance(total, int):
        return PlannedSteps(total=total, unnamed=fresh if isinstance(fresh, int) else 0)
    return PlannedSteps()
