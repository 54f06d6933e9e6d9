"""Names of attempts, and the records of their starts."""

from __future__ import annotations

from collections.abc import Mapping

from ...planning.step import StepSpec
from ...secrets import is_tokenlike
from .attempt import Attempt
from .commit import GroupCommit
from .run_schedule import RunSchedule


class StartRecords:
    """Naming of a run's attempts, and recorder of their starts."""

    def __init__(
        self,
        schedule: RunSchedule,
        commits: GroupCommit,
        environ: Mapping[str, str],
        folder: str,
    ) -> None:
        """Create the recorder with the caller's environment and the directory of all attempts."""
        self._schedule, self._commits = schedule, commits
        self._environ, self._folder = environ, folder
        self._names: dict[str, int] = {}  # attempts by key, or by step without a key

    def name_of(self, attempt: Attempt) -> str:
        """Return the name of a new attempt, which starts with its cache key.

        By this key, the next worker finds the attempt. Without a key, the name begins with the
        run.
        """
        run, what = self._commits.run, attempt.key or attempt.id
        self._names[what] = number = self._names.get(what, 0) + 1
        # A job is identified by its name, which must differ from those of earlier workers.
        ordinal = f"{self._commits.fence}-{number}"
        if attempt.key is not None:
            return f"{attempt.key[:24]}-{run}-{ordinal}"
        return f"{run}-{attempt.number}-{ordinal}"

    def record(self, id: str, attempt: Attempt) -> None:
        """Record the start of a step's attempt in the journal.

        A reattached attempt of this run keeps its attempt number.
        """
        if not attempt.is_reattached or not self._commits.tries(id):
            self._commits.next_attempt(id)
        data: dict[str, object] = {
            "log": f"{self._folder}/{attempt.name}.log",
            "attempt": self._commits.tries(id),
            **_facts_of_log(attempt, self._folder, self._environ),
        }
        if attempt.is_reattached:
            data["taken_up"] = True
        else:
            data |= self._notes_of_state(id, attempt)
        if attempt.place.elsewhere:
            data["site"] = attempt.place.elsewhere
            if attempt.state is not None:
                data["generation"] = attempt.state.id
        self._schedule.start(id, data)

    def _notes_of_state(self, id: str, attempt: Attempt) -> dict[str, object]:
        """Describe the checkpoint from which a training resumes, and report skipped checkpoints."""
        for found in attempt.restored.values():
            if found.passed and found.name is None:
                self._commits.say(f"{id}: {found.words}")
        if attempt.state is None:
            return {}
        words = [attempt.state.note, *(found.words for found in attempt.restored.values())]
        note = "; ".join(filter(None, words))
        return {"note": note} if note else {}


def _facts_of_log(attempt: Attempt, folder: str, environ: Mapping[str, str]) -> dict[str, object]:
    """Return facts for readers of the raw log: the source of metrics, and secrets to mask."""
    spec, facts = attempt.spec, dict[str, object]()
    if spec.metrics is not None and spec.metrics.in_environment:
        facts["metrics"] = f"{folder}/{attempt.name}.metrics"
    elif spec.metrics is not None and spec.metrics.pattern:
        facts["pattern"] = spec.metrics.pattern
    secrets = _secret_variables(spec, environ)
    if secrets:
        facts["secrets"] = secrets
    if spec.env_files:
        facts["env_files"] = list(spec.env_files)
    return facts


def _secret_variables(spec: StepSpec, environ: Mapping[str, str]) -> list[str]:
    """Return the names of environment variables whose values the step's log may contain."""
    names = [secret.source for secret in spec.secrets if environ.get(secret.source)]
    names += [name for name in spec.pass_env if is_tokenlike(name, environ.get(name, ""))]
    return names
