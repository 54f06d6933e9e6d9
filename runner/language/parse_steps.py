"""The steps of a document, read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import units
from .recipe import Metrics, Output, Select, State, Step, Uses
from .source import Source, code, env_files, path_or_glob
from .spelling import as_written
from .template import has
from .values import Where

_USES_KEYS = frozenset(("uses", "with", "preset", "needs", "when", "matrix", "where", "resources"))
_SELECT_KEYS = frozenset(("select", "min", "max", "needs", "when"))


class StepsReader:
    """Of one document."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def step(self, id: str, raw: dict[str, Any]) -> Step:
        path: Where = ("steps", id)
        for n, need in enumerate(raw.get("needs", ())):
            self._check_step_name(id, need, (*path, "needs", n))
        self._check_kind(id, raw, path)
        retries = raw.get("retries", 0)
        failure, preemption = (
            (retries.get("failure", 0), retries.get("preemption", 10))
            if isinstance(retries, dict)
            else (retries, 10)
        )
        oom = (
            {str(name): int(text[1:]) for name, text in retries.get("oom", {}).items()}
            if isinstance(retries, dict)
            else {}
        )
        for name in oom:
            if name not in self._source.inputs:
                where = (*path, "retries", "oom", name)
                self._source.problem(
                    "unknown-input",
                    f'there is no input "{name}"',
                    where,
                    self._source.near(name, self._source.inputs),
                    key=True,
                )
        self._source.check_numbers(raw.get("matrix"), (*path, "matrix"))
        nodes = raw.get("nodes")
        document = self._source.document
        return Step(
            id=id,
            origin=path,
            run=as_written(document, raw.get("run"), (*path, "run")),
            accelerate=self._accelerate(raw, path),
            uses=Uses(raw["uses"], raw.get("with", {}), raw.get("preset"))
            if "uses" in raw
            else None,
            select=self._select(id, raw, path) if "select" in raw else None,
            shell=raw.get("shell", "sh"),
            needs=tuple(raw.get("needs", ())),
            deps=tuple(map(path_or_glob, raw.get("deps", ()))),
            code=code(raw["code"]) if "code" in raw else None,
            files=raw.get("files", {}),
            outputs=tuple(self._outputs(id, raw["outputs"], path)) if "outputs" in raw else (),
            state=tuple(
                self._state(name, item or {}, (*path, "state", name))
                for name, item in raw["state"].items()
            )
            if "state" in raw
            else (),
            env=as_written(document, raw.get("env", {}), (*path, "env")),
            pass_env=tuple(raw.get("pass_env", ())),
            env_files=env_files(raw),
            secrets=self._source.secrets(raw, path) if "secrets" in raw else None,
            image=raw.get("image"),
            python=self._source.python(raw.get("python"), (*path, "python")),
            resources=self._source.resources(raw.get("resources", {}), (*path, "resources")),
            nodes=int(nodes) if isinstance(nodes, float) else nodes,
            matrix=raw.get("matrix"),
            allow_failure=raw.get("allow_failure", False),
            when=raw.get("when"),
            retries=int(failure),
            preemptions=int(preemption),
            oom=oom,
            timeout=self._source.unit(units.duration, raw, "timeout", path),
            idle_timeout=self._source.unit(units.duration, raw, "idle_timeout", path),
            cache=raw.get("cache", True),
            metrics=self._metrics(raw["metrics"], path) if raw.get("metrics") else None,
            local=raw.get("where") == "local",
        )

    def _accelerate(self, raw: dict[str, Any], path: Where) -> dict[str, Any] | None:
        block: dict[str, Any] | None = raw.get("accelerate")
        if block is None or "args" not in block:
            return block
        where = (*path, "accelerate", "args")
        return {**block, "args": as_written(self._source.document, block["args"], where)}

    def _check_step_name(self, id: str, name: str, path: Where) -> None:
        if name == id:
            self._source.problem(
                "cycle", f'step "{id}" needs itself: {id} -> {id}', path, "remove it"
            )
        elif name not in self._source.steps:
            self._source.problem(
                "unknown-step",
                f'there is no step "{name}"',
                path,
                self._source.near(name, (other for other in self._source.steps if other != id)),
            )

    def _check_kind(self, id: str, raw: dict[str, Any], path: Where) -> None:
        """Keys that say nothing on this kind of step are mistakes."""
        if "uses" in raw or "select" in raw:
            kind, keys = ("uses", _USES_KEYS) if "uses" in raw else ("select", _SELECT_KEYS)
            for word in raw:
                if word not in keys:
                    fix = f"a step with `{kind}` takes only {' '.join(sorted(keys - {kind}))}"
                    self._source.problem(
                        "useless-key",
                        f'"{word}" has no place beside `{kind}`',
                        (*path, word),
                        fix,
                        key=True,
                    )
        for words, kind in ((("with", "preset"), "uses"), (("min", "max"), "select")):
            for word in words:
                if word in raw and kind not in raw and not ("uses" in raw or "select" in raw):
                    self._source.problem(
                        "useless-key",
                        f'"{word}" says nothing without `{kind}`',
                        (*path, word),
                        key=True,
                    )
        if "shell" in raw and "run" in raw and not isinstance(raw["run"], str):
            message = f'step "{id}" runs a list of arguments, which no shell reads'
            self._source.problem(
                "useless-key",
                message,
                (*path, "shell"),
                "remove it, or write the command as a script",
                key=True,
            )
        if raw.get("allow_failure") and "matrix" not in raw:
            self._source.problem(
                "useless-key",
                '"allow_failure" says nothing without `matrix`',
                (*path, "allow_failure"),
                key=True,
            )

    def _select(self, id: str, raw: dict[str, Any], path: Where) -> Select:
        name = raw["select"]
        head, _, inside = name.partition("/")
        self._check_step_name(id, head, (*path, "select"))
        source = self._source.raw.get("steps", {}).get(head)
        if (
            head != id and source is not None and "uses" not in source
        ):  # what a recipe has inside is not known here
            if inside:
                self._source.problem(
                    "unknown-step",
                    f'"{head}" has no steps inside',
                    (*path, "select"),
                    f"select: {head}",
                )
            elif "matrix" not in source:
                self._source.problem(
                    "not-a-matrix",
                    f'step "{name}" has no `matrix` to select from',
                    (*path, "select"),
                    "mention its outputs directly",
                )
        best = [word for word in ("min", "max") if word in raw]
        if len(best) != 1:
            fix = "keep one" if best else "min: METRIC takes the least, max: METRIC the greatest"
            what = 'neither "min" nor "max"' if not best else 'both "min" and "max"'
            self._source.problem(
                "missing-key" if not best else "one-of",
                f'step "{id}" has {what}',
                path,
                fix,
                key=True,
            )
        return Select(name, raw.get("min", raw.get("max", "")), "min" if "min" in raw else "max")

    def _outputs(self, id: str, raw: Any, path: Where) -> Iterator[Output]:
        """A plain list names each output by its path."""
        named = raw.items() if isinstance(raw, dict) else [(item, item) for item in raw]
        seen: dict[str, str] = {}
        for n, (name, item) in enumerate(named):
            place: Where = (*path, "outputs", name if isinstance(raw, dict) else n)
            long = item if isinstance(item, dict) else {"path": item}
            text = long["path"]
            bare = text.rstrip("/") if text.endswith("/") else text
            if not bare:
                self._source.problem(
                    "bad-path",
                    f'"{text}" is not the path of an output',
                    place,
                    "an output is below the attempt directory: models/, report.json",
                )
                continue
            if bare in seen and not has(bare):
                other = f'"{seen[bare]}" and "{name}"' if seen[bare] != name else "two outputs"
                self._source.problem(
                    "same-path",
                    f'{other} of step "{id}" are one path, {text}',
                    place,
                    "give each a path of its own",
                )
            seen[bare] = name
            yield Output(
                name=name,
                path=bare,
                directory=text.endswith("/"),
                optional=long.get("optional", False),
                nonempty=long.get("nonempty", False),
                temporary=long.get("temporary", False),
                sync=self._source.unit(units.duration, long, "sync", place),
                doc=long.get("doc", ""),
            )

    def _state(self, name: str, raw: dict[str, Any], path: Where) -> State:
        keep = raw.get("keep")
        if keep is not None and "checkpoint" not in raw:
            self._source.problem(
                "missing-key",
                f'"keep" of state "{name}" counts checkpoints, and no "checkpoint" says what one is',
                (*path, "keep"),
                "add checkpoint: step-*",
                key=True,
            )
        return State(
            name=name,
            path=raw.get("path", f"state/{name}").rstrip("/") or "/",
            checkpoint=raw.get("checkpoint"),
            every=self._source.unit(units.duration, raw, "every", path),
            keep=None if keep is None else int(keep),
            shared="to" in raw,
        )

    def _metrics(self, raw: Any, path: Where) -> Metrics:
        if raw is True:
            return Metrics()
        if "pattern" in raw:
            found = self._source.expression(raw["pattern"], (*path, "metrics", "pattern"))
            if found is not None and not found.groupindex:
                self._source.problem(
                    "bad-pattern",
                    "the pattern has no named group, and so no metric",
                    (*path, "metrics", "pattern"),
                    "name what it finds: loss (?P<loss>[0-9.]+)",
                )
        return Metrics(raw.get("file"), raw.get("pattern"))
