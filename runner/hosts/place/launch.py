"""Render a step: the files to write, the argv, the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CannotRun
from ...language import template
from ...language.shell import script
from ...language.template import TemplateError, evaluate, text_of
from ...language.unknowns import kinds_of
from ...planning.step import StepSpec, unwritable

SHIM = "_recipe_world.py"
PORT = "{MASTER_PORT}"
"""Placeholder for the rendezvous port in a multi-node command.

The port is chosen when all nodes have their inputs.
"""

# Runs in every process that `accelerate launch` starts, because the launcher may silently start too
# few processes.
_SHIM_TEXT = """\
import os, runpy, sys
want, got = int(os.environ["RECIPE_WORLD_SIZE"]), int(os.environ.get("WORLD_SIZE", "1"))
if want != got:
    sys.exit(f"recipe: accelerate started {got} processes instead of {want}; its config may override `processes`")
kind, name, *rest = sys.argv[1:]
sys.argv = [name, *rest]
if kind == "module":
    sys.path[0] = os.getcwd()
    runpy.run_module(name, run_name="__main__", alter_sys=True)
else:
    sys.path[0] = os.path.dirname(os.path.abspath(name))
    runpy.run_path(name, run_name="__main__")
"""


class Launch(NamedTuple):
    """The rendered command of one attempt."""

    argv: tuple[str, ...]
    files: Mapping[str, bytes]  # to write into the attempt directory first
    env: Mapping[str, str]
    script: str | None = None  # a shell script; its path is appended to argv


def render(spec: StepSpec, scope: Mapping[str, Any], *, python: str) -> Launch:
    """Render a step.

    `scope` includes the names known only at run time.  Raises CannotRun that names the failing
    template.
    """
    launch = _render_command(spec, scope, python)
    if not spec.options.nice:
        return launch
    # `nice` as a program works on hosts and in containers, and applies to all processes of the
    # step.
    return launch._replace(argv=("nice", "-n", f"{spec.options.nice}", *launch.argv))


def _render_command(spec: StepSpec, scope: Mapping[str, Any], python: str) -> Launch:
    env: dict[str, str] = {}
    for name, value in spec.env.items():
        text = _render_variable(value, scope, f"env.{name}")
        if text is not None:
            env[name] = text
    files = {path: _render_file(path, tree, scope) for path, tree in spec.files.items()}
    try:
        if spec.accelerate is not None:
            files[SHIM] = _SHIM_TEXT.encode()
            argv, extra = _render_accelerate(spec.accelerate, scope, python)
            return Launch(tuple(argv), files, {**extra, **env})
        run = spec.run
        if isinstance(run, list):
            is_rendered = all(isinstance(word, str) and "{{" not in word for word in run)
            words = run if is_rendered else template.argv(run, scope)
            if not words:
                raise CannotRun("the step's command is empty")
            return Launch(tuple(words), files, env)
        assert isinstance(run, str)
        bash = spec.shell == "bash"
        if "{{" in run:
            run = script(run, scope, bash=bash)
        shell = ("bash", "-euo", "pipefail") if bash else ("/bin/sh", "-eu")
        return Launch(shell, files, env, run)
    except TemplateError as error:
        raise CannotRun(str(error), fix=error.fix) from error


def is_plain(spec: StepSpec) -> bool:
    """Return whether a step contains no templates and renders the same in every scope."""
    run = spec.run
    if spec.files or spec.accelerate is not None:
        return False
    if not isinstance(run, str) or "{{" in run:
        return False
    return not any(isinstance(value, str) and "{{" in value for value in spec.env.values())


def count_processes(block: Mapping[str, Any], scope: Mapping[str, Any]) -> int:
    """Return the number of processes per node of an `accelerate` block, by default one per GPU.

    Raises CannotRun.
    """
    try:
        processes = template.render(block.get("processes"), scope)
        return int(str(processes or max(1, int(scope["host"]["gpus"]))))
    except (TemplateError, ValueError) as error:
        raise CannotRun(f"accelerate.processes: {error}") from error


def _render_accelerate(
    block: Mapping[str, Any], scope: Mapping[str, Any], python: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of an `accelerate` block."""
    settings = {key: value for key, value in block.items() if key != "args"}
    fields = template.render(settings, scope)
    assert isinstance(fields, dict)
    each = count_processes(block, scope)
    words = [python, "-m", "accelerate.commands.launch", *_launcher_flags(fields, scope, each)]
    kind = "module" if "module" in block else "script"
    words += [SHIM, kind, template.program(block[kind], scope)]
    given = block.get("args")
    if isinstance(given, Mapping):
        words += template.args(given, scope)
    elif given:
        words += template.argv(list(given), scope)
    threads = str(max(1, int(scope["host"]["cpus"]) // each))
    env = {
        "RECIPE_WORLD_SIZE": str(each * int(scope["nodes"]["count"])),
        # A value in the worker's environment applies to its steps too; it is no part of the cache
        # key.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    if int(scope["host"]["gpus"]) == 0:
        env["ACCELERATE_USE_CPU"] = "true"
    return words, env


def _launcher_flags(fields: Mapping[str, Any], scope: Mapping[str, Any], each: int) -> list[str]:
    """Return the flags of `accelerate launch` for `each` processes per node."""
    nodes, rank = int(scope["nodes"]["count"]), int(scope["node"]["rank"])
    world = each * nodes
    words = []
    if fields.get("config"):
        words += ["--config_file", text_of(fields["config"])]
    words += ["--num_processes", str(world), "--num_machines", str(nodes)]
    words += ["--mixed_precision", text_of(fields.get("mixed_precision") or "no")]
    words += ["--dynamo_backend", "no"]
    if world > 1:
        # Necessary without GPUs too: `--cpu --num_processes 2` would silently run one process.
        words += ["--multi_gpu"]
    if nodes > 1:
        words += ["--machine_rank", str(rank)]
        words += ["--main_process_ip", scope["nodes"]["addresses"][0]]
        words += ["--main_process_port", PORT]
        words += ["--rdzv_backend", "static", "--same_network"]
    elif world > 1:
        words += ["--main_process_port", "0"]
    return words


def _render_file(path: str, tree: Any, scope: Mapping[str, Any]) -> bytes:
    try:
        value: Any = template.render(tree, scope)
    except TemplateError as error:
        raise CannotRun(f"files.{path}: {error}", fix=error.fix) from error
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    wrong = unwritable(path, kinds_of(value))
    if wrong:
        raise CannotRun(
            f"files.{path}: {wrong}",
            fix="use one of these suffixes, or write the content of the file as text",
        )
    suffix = os.path.splitext(path)[1]
    if suffix == ".json":
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    if suffix in (".yaml", ".yml"):
        from ...language import yaml_text

        return yaml_text.block(value).encode()
    return "\n".join(_toml(value, ())).encode() + b"\n"


def _toml(table: Mapping[str, Any], name: tuple[str, ...]) -> list[str]:
    """Return a table as TOML lines: plain values first, then its tables.

    Null values are left out.
    """
    lines: list[str] = []
    if name:
        lines.append(f"[{'.'.join(map(json.dumps, name))}]")
    for key, value in table.items():
        if value is not None and not isinstance(value, dict):
            lines.append(f"{json.dumps(key)} = {_toml_value(value)}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", *_toml(value, (*name, key))]
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        present = {key: inner for key, inner in value.items() if inner is not None}
        pairs = [f"{json.dumps(key)} = {_toml_value(inner)}" for key, inner in present.items()]
        return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False)


def _render_variable(value: Any, scope: Mapping[str, Any], what: str) -> str | None:
    """Return the text of an environment variable; None for null, which leaves the variable unset."""
    if isinstance(value, str) and "{{" not in value:
        return value

    try:
        result = evaluate(value, scope) if isinstance(value, str) else value
        return None if result is None else text_of(result)
    except TemplateError as error:
        raise CannotRun(f"{what}: {error}", fix=error.fix) from error
