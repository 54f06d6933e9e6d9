"""Parse the steps of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from . import units
from .parse_context import ParseContext, code, env_files, path_or_glob
from .recipe import Metrics, Output, Select, StateDirectory, Step, Uses
from .spelling import as_written
from .step_options import DEFAULT_PREEMPTIONS, StepOptions
from .template import has
from .values import Where

_USES_KEYS = frozenset(("uses", "with", "preset", "needs", "when", "matrix", "where", "resources"))
_SELECT_KEYS = frozenset(("select", "min", "max", "needs", "when"))


class _Retries(NamedTuple):
    """Number of retries of a step for each failure reason."""

    failure: int
    preemption: int
    oom: dict[str, int]  # input -> divisor


class StepsReader:
    """Parser of a document's steps. Problems are added to its context."""

    def __init__(self, context: ParseContext) -> None:
        self._context = context

    def step(self, id: str, raw: dict[str, Any]) -> Step:
        """Parse the step `id`."""
        path: Where = ("steps", id)
        context, document = self._context, self._context.document
        for index, need in enumerate(raw.get("needs", ())):
            self._check_step_name(id, need, (*path, "needs", index))
        self._check_keys_of_kind(raw, path)
        self._check_program(raw.get("run"), path)
        self._check_shell(id, raw, path)
        self._check_allow_failure(raw, path)
        context.check_numbers(raw.get("matrix"), (*path, "matrix"))
        nodes = raw.get("nodes")
        if isinstance(nodes, float):
            nodes = int(nodes)
        # None leaves the recipe's setting; an empty list replaces it.
        own_code = code(raw["code"]) if "code" in raw else None
        own_tools = tuple(raw["tools"]) if "tools" in raw else None
        # Problems at one place are listed in the order of these lines.
        return Step(
            id=id,
            origin=path,
            run=as_written(document, raw.get("run"), (*path, "run")),
            accelerate=self._accelerate(raw, path),
            uses=_uses(raw),
            select=self._select(id, raw, path),
            shell=raw.get("shell", "sh"),
            needs=tuple(raw.get("needs", ())),
            deps=tuple(map(path_or_glob, raw.get("deps", ()))),
            code=own_code,
            files=raw.get("files", {}),
            outputs=tuple(self._outputs(id, raw.get("outputs", ()), path)),
            state=tuple(self._states(raw.get("state", {}), path)),
            env=as_written(document, raw.get("env", {}), (*path, "env")),
            pass_env=tuple(raw.get("pass_env", ())),
            env_files=env_files(raw),
            secrets=self._own_secrets(raw, path),
            tools=own_tools,
            image=raw.get("image"),
            python=context.python(raw.get("python"), (*path, "python")),
            resources=context.resources(raw.get("resources", {}), (*path, "resources")),
            nodes=nodes,
            matrix=raw.get("matrix"),
            allow_failure=raw.get("allow_failure", False),
            when=raw.get("when"),
            options=self._options(raw, path),
            cache=raw.get("cache", True),
            metrics=self._metrics(raw.get("metrics"), path),
            local=raw.get("where") == "local",
        )

    def _options(self, raw: dict[str, Any], path: Where) -> StepOptions:
        retries = self._retries(raw.get("retries", 0), path)
        return StepOptions(
            retries=retries.failure,
            preemptions=retries.preemption,
            oom=retries.oom,
            timeout=self._context.unit(units.duration, raw, "timeout", path),
            idle_timeout=self._context.unit(units.duration, raw, "idle_timeout", path),
            ends_on_nan=self._ends_on_nan(raw, path),
            nice=int(raw.get("nice", 0)),
            sandbox=_sandbox(raw.get("sandbox", self._context.raw.get("sandbox"))),
        )

    def _ends_on_nan(self, raw: dict[str, Any], path: Where) -> bool:
        ends = raw.get("on_nan") == "stop"
        if ends and not raw.get("metrics"):
            message = "`on_nan` checks the losses in `metrics`, but the step has no `metrics`"
            fix = "add `metrics: true`, or `metrics` with a file or a pattern"
            self._context.problem("missing-key", message, (*path, "on_nan"), fix, key=True)
        return ends

    # -- checks --

    def _check_step_name(self, id: str, name: str, path: Where) -> None:
        """Report a dependency on an unknown step or on the step itself."""
        if name == id:
            message = f'step "{id}" depends on itself: {id} -> {id}'
            self._context.problem("cycle", message, path, "remove this dependency")
        elif name not in self._context.steps:
            others = (other for other in self._context.steps if other != id)
            fix = self._context.suggest(name, others)
            self._context.problem("unknown-step", f'there is no step "{name}"', path, fix)

    def _check_program(self, run: Any, path: Where) -> None:
        """Report a command that starts with a number or an option."""
        where: Where = (*path, "run")
        while isinstance(run, list) and run:
            run, where = run[0], (*where, 0)
        # `true` and `false` are programs, though YAML reads them as values.
        is_number = isinstance(run, (int, float)) and not isinstance(run, bool)
        is_option = isinstance(run, str) and run.startswith("-")
        is_in_list = where[-1] != "run"  # a script may start with anything
        if is_in_list and (is_number or is_option):
            message = f"a command must start with a program, not with {run}"
            self._context.problem("bad-command", message, where, "name the program to run")

    def _check_keys_of_kind(self, raw: dict[str, Any], path: Where) -> None:
        """Report keys that have no effect for this kind of step."""
        if "uses" in raw:
            self._check_only_keys(raw, path, "uses", _USES_KEYS)
        elif "select" in raw:
            self._check_only_keys(raw, path, "select", _SELECT_KEYS)
        else:
            self._check_no_keys(raw, path, "uses", ("with", "preset"))
            self._check_no_keys(raw, path, "select", ("min", "max"))

    def _check_only_keys(
        self, raw: dict[str, Any], path: Where, kind: str, keys: frozenset[str]
    ) -> None:
        fix = f"a step with `{kind}` takes only {' '.join(sorted(keys - {kind}))}"
        for word in raw:
            if word not in keys:
                message = f'"{word}" is not allowed together with `{kind}`'
                self._report_useless(message, (*path, word), fix)

    def _check_no_keys(
        self, raw: dict[str, Any], path: Where, kind: str, keys: tuple[str, ...]
    ) -> None:
        for word in keys:
            if word in raw:
                self._report_useless(f'"{word}" has no effect without `{kind}`', (*path, word))

    def _check_shell(self, id: str, raw: dict[str, Any], path: Where) -> None:
        is_list = "run" in raw and not isinstance(raw["run"], str)
        if is_list and "shell" in raw:
            message = f'step "{id}" runs a list of arguments, without a shell'
            fix = "remove `shell`, or write the command as one script"
            self._report_useless(message, (*path, "shell"), fix)

    def _check_allow_failure(self, raw: dict[str, Any], path: Where) -> None:
        if raw.get("allow_failure") and "matrix" not in raw:
            message = '"allow_failure" has no effect without `matrix`'
            self._report_useless(message, (*path, "allow_failure"))

    def _report_useless(self, message: str, path: Where, fix: str = "") -> None:
        self._context.problem("useless-key", message, path, fix, key=True)

    # -- parts of a step --

    def _retries(self, raw: Any, path: Where) -> _Retries:
        if not isinstance(raw, dict):
            return _Retries(int(raw), DEFAULT_PREEMPTIONS, {})
        oom = {str(name): int(text[1:]) for name, text in raw.get("oom", {}).items()}
        for name in oom:
            if name not in self._context.inputs:
                message = f'there is no input "{name}"'
                where = (*path, "retries", "oom", name)
                fix = self._context.suggest(name, self._context.inputs)
                self._context.problem("unknown-input", message, where, fix, key=True)
        failure, preemption = raw.get("failure", 0), raw.get("preemption", DEFAULT_PREEMPTIONS)
        return _Retries(int(failure), int(preemption), oom)

    def _accelerate(self, raw: dict[str, Any], path: Where) -> dict[str, Any] | None:
        block: dict[str, Any] | None = raw.get("accelerate")
        if block is None or "args" not in block:
            return block
        where = (*path, "accelerate", "args")
        return {**block, "args": as_written(self._context.document, block["args"], where)}

    def _select(self, id: str, raw: dict[str, Any], path: Where) -> Select | None:
        if "select" not in raw:
            return None
        name = raw["select"]
        self._check_selected(id, name, (*path, "select"))
        if "min" not in raw and "max" not in raw:
            message = f'step "{id}" has neither "min" nor "max"'
            fix = "add `min: METRIC` for the lowest value or `max: METRIC` for the highest"
            self._context.problem("missing-key", message, path, fix, key=True)
        elif "min" in raw and "max" in raw:
            message = f'step "{id}" has both "min" and "max"'
            self._context.problem("one-of", message, path, "keep one", key=True)
        best: Literal["min", "max"] = "min" if "min" in raw else "max"
        return Select(step=name, metric=raw.get(best, ""), best=best)

    def _check_selected(self, id: str, name: str, path: Where) -> None:
        """Report a `select` step that is missing or has no matrix.

        Steps inside another recipe are not known here.
        """
        head, _, inside = name.partition("/")
        self._check_step_name(id, head, path)
        source = self._context.raw.get("steps", {}).get(head)
        is_reported = head == id or source is None
        if is_reported or "uses" in source:
            return
        if inside:
            message = f'"{head}" contains no steps'
            self._context.problem("unknown-step", message, path, f"select: {head}")
        elif "matrix" not in source:
            message = f'step "{name}" has no `matrix` to select from'
            self._context.problem("not-a-matrix", message, path, "use the step's outputs directly")

    def _outputs(self, id: str, raw: Any, path: Where) -> Iterator[Output]:
        """Yield the outputs of a step. Outputs in a plain list are named by their paths."""
        name_of_path: dict[str, str] = {}
        for key, name, settings in _outputs_in(raw):
            where: Where = (*path, "outputs", key)
            text = settings["path"]
            bare = text.rstrip("/")
            if not bare:
                self._report_bad_path(text, where)
                continue
            # A path with a template is compared when it is rendered, by the compiler.
            if bare in name_of_path and not has(bare):
                self._report_same_path(id, text, name_of_path[bare], name, where)
            name_of_path[bare] = name
            yield self._output(name, settings, where)

    def _output(self, name: str, settings: dict[str, Any], where: Where) -> Output:
        path = settings["path"]
        return Output(
            name=name,
            path=path.rstrip("/"),
            directory=path.endswith("/"),
            optional=settings.get("optional", False),
            nonempty=settings.get("nonempty", False),
            temporary=settings.get("temporary", False),
            sync=self._context.unit(units.duration, settings, "sync", where),
            doc=settings.get("doc", ""),
        )

    def _report_bad_path(self, path: str, where: Where) -> None:
        message = f'invalid output path "{path}"'
        fix = "use a path below the attempt directory, such as models/ or report.json"
        self._context.problem("bad-path", message, where, fix)

    def _report_same_path(self, id: str, path: str, first: str, second: str, where: Where) -> None:
        names = f'"{first}" and "{second}"' if first != second else "two outputs"
        message = f'{names} of step "{id}" have the same path, {path}'
        self._context.problem("same-path", message, where, "use a different path for each output")

    def _own_secrets(self, raw: dict[str, Any], path: Where) -> tuple[str, ...] | None:
        if "secrets" not in raw:
            return None
        return self._context.secrets(raw, path)

    def _states(self, raw: dict[str, Any], path: Where) -> Iterator[StateDirectory]:
        for name, item in raw.items():
            # `state: {model: }` is a state with every setting at its default.
            yield self._state(name, item or {}, (*path, "state", name))

    def _state(self, name: str, raw: dict[str, Any], path: Where) -> StateDirectory:
        keep = raw.get("keep")
        if keep is not None and "checkpoint" not in raw:
            message = f'"keep" of state "{name}" counts checkpoints, but "checkpoint" is not set'
            fix = "add the name pattern of a checkpoint, for example `checkpoint: step-*`"
            self._context.problem("missing-key", message, (*path, "keep"), fix, key=True)
        if keep is not None:
            keep = int(keep)
        every = self._context.unit(units.interval, raw, "every", path) or units.Interval()
        return StateDirectory(
            name=name,
            path=raw.get("path", f"state/{name}").rstrip("/") or "/",
            checkpoint=raw.get("checkpoint"),
            every=every.seconds,
            every_steps=every.steps,
            keep=keep,
            shared="to" in raw,
        )

    def _metrics(self, raw: Any, path: Where) -> Metrics | None:
        if not raw:
            return None
        if raw is True:
            return Metrics()
        if "pattern" in raw:
            where = (*path, "metrics", "pattern")
            found = self._context.expression(raw["pattern"], where)
            if found is not None and not found.groupindex:
                message = "the pattern has no named group, so it yields no metric"
                fix = "name the group: loss (?P<loss>[0-9.]+)"
                self._context.problem("bad-pattern", message, where, fix)
        return Metrics(raw.get("file"), raw.get("pattern"))


def _outputs_in(raw: Any) -> Iterator[tuple[str | int, str, dict[str, Any]]]:
    """Yield the key, the name and the settings of each output in a mapping or list."""
    if not isinstance(raw, dict):
        for index, path in enumerate(raw):
            yield index, path, {"path": path}
        return
    for name, item in raw.items():
        settings = item if isinstance(item, dict) else {"path": item}
        yield name, name, settings


def _sandbox(raw: Any) -> str:
    if raw is None:
        return ""
    if isinstance(raw, dict):
        return "network" if raw["network"] else "closed"
    return "closed" if raw else "off"


def _uses(raw: dict[str, Any]) -> Uses | None:
    if "uses" not in raw:
        return None
    return Uses(raw["uses"], raw.get("with", {}), raw.get("preset"))
