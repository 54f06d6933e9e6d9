"""Hints for failed attempts, from their exit and log. Pure functions of their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from drivers.base import Exit

from ...planning.step import StepSpec
from ...secrets import is_tokenlike

_VARIABLE: Final = r"([A-Za-z_][A-Za-z0-9_]*): (?:parameter (?:null or )?not set|unbound variable)"
_KEY_ERROR: Final = r"^(?:.*<frozen os>|.*\bos\.environ\b|.*/os\.py\").*\n(?:.*\n)*?KeyError: '([A-Za-z_][A-Za-z0-9_]*)'"
_MODULE: Final = r"ModuleNotFoundError: No module named '([\w.]+)'"
_GPU_MEMORY: Final = (
    r"OutOfMemoryError|(?:CUDA|HIP|XPU)\b.{0,20} out of memory|CUDA_ERROR_OUT_OF_MEMORY"
)
_DENIED: Final = r"(?:cannot run |: )(\S+): Permission denied"
_REFUSED: Final = r"Permission denied|PermissionError|Read-only file system"
_ABSENT: Final = (
    r"(?:cannot run |: )(\S+): (?:no such program in PATH|not found|command not found|No such file)"
)
_ABOVE: Final = r"can't open file '[^']*?/((?:\.\./)+)([^']+)'"
_EXISTS: Final = (
    r"(?:FileExistsError: .*File exists: '|mkdir: .*[‘'])([^'’\n]+)[’'](?:: File exists)?$"
)
_NO_NETWORK: Final = (
    r"[Nn]ame resolution|Name or service not known|Network is unreachable|Could not resolve host"
)
_UNSEEN: Final = "(?:No such file or directory|Read-only file system)"
_OUTSIDE: Final = rf"{_UNSEEN}: ['\"](/[^'\"\n]+)|(/[^\s'’\":]+)['’\"]?: {_UNSEEN}"  # in Python, in other programs
KILLED: Final = 137
"""Exit code of a shell whose program received SIGKILL."""


class AttemptEnvironment(NamedTuple):
    """Environment in which an attempt ran."""

    python: str
    """Description of the interpreter and its version."""
    lock: str = ""
    image: str = ""
    host: str = ""
    """Name of the host; empty for this machine."""
    given_files: bool = False
    """Whether the attempt received read-only input files."""
    executable: Callable[[str], bool] = lambda _path: False
    """Function that returns True if a workspace file has an execute bit."""
    sandbox: str = ""
    """Sandbox mode: `closed`, `network` (with network access), or empty."""
    hidden: Callable[[str], bool] = lambda _path: False
    """Function that returns True if the sandbox may hide an absolute path."""


def find_hint(
    exit: Exit,
    log: str,
    spec: StepSpec,
    ran: AttemptEnvironment,
    environ: Mapping[str, str],
    dotenv: Collection[str] = (),
) -> str:
    """Return a hint for fixing a failed attempt; empty if none is known.

    `log` is the end of its log, `environ` the caller's environment, `dotenv` the names in the
    workspace's `.env`.
    """
    # Patterns are compiled only after a failure, because compiling takes longer than many runs.
    if re.search(_GPU_MEMORY, log):
        return "the GPU is out of memory: use a smaller batch, shorter sequences or gradient checkpointing; see other GPU processes with `nvidia-smi`"
    if found := re.search(_KEY_ERROR, log, re.MULTILINE) or re.search(_VARIABLE, log):
        return explain_unset(found[1], spec, environ, dotenv)
    if ran.sandbox and (words := _about_sandbox(log, spec, ran)):
        return words
    if found := re.search(_ABOVE, log):
        return f"steps run in the workspace root, wherever the recipe file is: write {found[2]} instead of {found[1]}{found[2]}"
    if found := re.search(_MODULE, log):
        return _absent_module(found[1].partition(".")[0], ran)
    if (found := re.search(_EXISTS, log, re.MULTILINE)) and _made_ahead(found[1], spec):
        return f"recipe creates the output directories before {spec.step} starts: create {found[1]} with `exist_ok=True`, or with `mkdir -p`"
    killed = exit.reason in ("exit", "signal") and (
        exit.signal == 9 or exit.code == KILLED
    )  # not by recipe, for example at a time limit
    if exit.reason == "oom" or killed:
        return (
            "the usual cause is a lack of memory (check `dmesg`): run fewer steps in parallel with `-j`, use smaller batches, or declare the memory "
            "with `resources: {memory: …}`"
        )
    if exit.code == 126 and (found := re.search(_DENIED, log)):
        program = found[1].removeprefix("./")
        if ran.executable(program):
            return _no_exec(program, ran)
        return f"{program} is not executable: run `chmod +x {program}`, or call it with an interpreter, as in `sh {program}`"
    if ran.given_files and re.search(_REFUSED, log):
        other = "" if ran.host else ', or set `inputs = "overlay"` in recipe.toml'
        return (
            "the files of an input are read-only, and `cp` and `copytree` copy that mode: use `cp -r --no-preserve=mode`, "
            f"or run `chmod -R u+w COPY` before the command writes to the copy{other}"
        )
    if exit.code == 127 and (found := re.search(_ABSENT, log)):
        return _absent_program(found[1], ran)
    return ""


def _about_sandbox(log: str, spec: StepSpec, ran: AttemptEnvironment) -> str:
    if ran.sandbox == "closed" and re.search(_NO_NETWORK, log):
        return f"the sandbox of {spec.step} has no network: set `sandbox: {{network: true}}`"
    for found in re.finditer(_OUTSIDE, log):
        path = found[1] or found[2]
        if ran.hidden(path):
            return (
                f"{path} is not declared; a sandboxed step sees only its declared files, its "
                "programs and the system's: declare it as an input, list it in `deps`, or set "
                "`sandbox: false`"
            )
    return ""


def _no_exec(program: str, ran: AttemptEnvironment) -> str:
    other = (
        "set `root` to another disk in the driver's settings"
        if ran.host
        else "move the workspace to another disk"
    )
    where = f" on {ran.host}" if ran.host else ""
    return (
        f"the disk of the step's directory{where} is mounted noexec, so it cannot run {program}: {other}, "
        f"or call the program with an interpreter, as in `sh {program}`"
    )


def _made_ahead(path: str, spec: StepSpec) -> bool:
    """Return True if a path is an output directory of the step, or one of its parents."""
    return any(
        f"/{path.strip('/')}/".endswith(f"/{above}/")
        for output in spec.names.outputs.values()
        for above in _folders(output)
    )


def _folders(output: str) -> list[str]:
    parts = output.strip("/").split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def explain_unset(
    name: str, spec: StepSpec, environ: Mapping[str, str], dotenv: Collection[str] = ()
) -> str:
    """Explain how to pass a missing environment variable to a step."""
    if name == "RECIPE_METRICS":
        return (
            f"recipe sets {name} only for steps with `metrics: true`: add this key to {spec.step}"
        )
    for each in spec.secrets:
        if each.variable == name:
            return f'{name} is the secret "{each.input}", and {each.source} is not set in your shell: export it'
    secret = name in spec.unlisted or is_tokenlike(name, environ.get(name) or "*" * 16)
    line = f"`{name.lower()}: {{type: secret, env: {name}}}` among the inputs and `secrets: [{name.lower()}]` in {spec.step}"
    if name in spec.unlisted:
        line = f'`secrets: [{spec.unlisted[name]}]` to {spec.step}: the input "{spec.unlisted[name]}" is this secret'
    elif not secret:
        line = f"`pass_env: [{name}]` to {spec.step}"
    if name in environ:
        return f"{name} is set in your shell but not in the step: add {line}"
    if name in dotenv and ".env" not in spec.env_files:
        return f"{name} is in .env: add `env_file: .env` to {spec.step}, or to the whole recipe"
    if name in spec.pass_env:
        return f"{name} is in `pass_env` but not set in your shell: export it"
    if spec.env_files:
        return f"{name} is set neither in your shell nor in {spec.env_files[-1]}: add a line `{name}=…` there"
    advice = f"{name} is set neither in your shell nor in the step: export it and add {line}"
    return advice if secret else f"{advice}, or set it with `env: {{{name}: …}}`"


def _absent_module(name: str, ran: AttemptEnvironment) -> str:
    if ran.image:
        return f"the image {ran.image} has no Python module {name}: use another image"
    if ran.lock:
        return f"the environment of {ran.lock} has no module {name}: add it to the requirements, and lock again"
    where = f" on {ran.host}" if ran.host else ""
    other = (
        "`python` in the driver's settings"
        if ran.host
        else "`--python PYTHON`, a .venv in the root,"
    )
    return f"{ran.python}{where} has no module {name}: install it there, choose another Python with {other} or name a lock with `python: {{lock: …}}`"


def _absent_program(name: str, ran: AttemptEnvironment) -> str:
    if ran.image:
        return f"the image {ran.image} has no program {name}: use another image"
    if "/" in name:
        return f"{name} is not in the step's directory: list it in `code`"
    where = f"on {ran.host}" if ran.host else "here"
    return f"{name} is not on the step's PATH: install it {where}, or, for your own script, list it in `code` and call it as ./{name}"
