"""What a failed step is told to do, by its exit and the end of its log."""

from __future__ import annotations

from typing import Any

import pytest

from drivers.base import Exit
from runner.execution.steps.hints import AttemptEnvironment, find_hint
from runner.planning.step import SecretSpec, StepSpec

SPEC = StepSpec("r@1", "train", {}, run=["true"], pass_env=["WANTED"])
HERE = AttemptEnvironment("/w/.venv/bin/python (3.12.3)")
SHELL = {"WANDB_PROJECT": "p", "WANDB_API_KEY": "0123456789"}
FROZEN = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "<frozen os>", line 679, in __getitem__\nKeyError: \'{}\'\n'
BY_LINE = "  File \"train.py\", line 3, in <module>\n    p = os.environ['WANDB_PROJECT']\nKeyError: '{}'\n"


def hint(log: str, code: int = 1, ran: AttemptEnvironment = HERE, **more: object) -> str:
    return find_hint(Exit(code, **more), log, SPEC, ran, SHELL)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "log",
    [
        FROZEN,
        BY_LINE,
        "/x/attempts/1.sh: 1: {}: parameter not set\n",
        "/x/1.sh: line 1: {}: unbound variable\n",
        "{}: parameter null or not set",
    ],
)
def test_a_missing_variable_is_named_with_the_line_to_add(log: str) -> None:
    assert (
        hint(log.format("WANDB_PROJECT"))
        == "WANDB_PROJECT is set in your shell but not in the step: add `pass_env: [WANDB_PROJECT]` to train"
    )
    assert "`secrets: [wandb_api_key]` in train" in hint(log.format("WANDB_API_KEY"))
    assert hint(log.format("OTHER")).startswith(
        "OTHER is set neither in your shell nor in the step: export it and add `pass_env: [OTHER]`"
    )
    assert (
        hint(log.format("WANTED")) == "WANTED is in `pass_env` but not set in your shell: export it"
    )


def test_a_missing_metrics_variable_is_declared_by_the_step() -> None:
    assert (
        hint(FROZEN.format("RECIPE_METRICS"))
        == "recipe sets RECIPE_METRICS only for steps with `metrics: true`: add this key to train"
    )


def test_of_a_secret_that_the_recipe_declares_the_input_is_named() -> None:
    log = FROZEN.format("WANDB_API_KEY")
    found = find_hint(Exit(1), log, SPEC._replace(unlisted={"WANDB_API_KEY": "key"}), HERE, SHELL)
    assert found.endswith('add `secrets: [key]` to train: the input "key" is this secret')
    listed = SPEC._replace(secrets=[SecretSpec("key", "WANDB_API_KEY", "MY_KEY", required=False)])
    assert (
        find_hint(Exit(1), log, listed, HERE, {})
        == 'WANDB_API_KEY is the secret "key", and MY_KEY is not set in your shell: export it'
    )


@pytest.mark.parametrize(
    "said",
    [
        "FileExistsError: [Errno 17] File exists: '{}'",
        "mkdir: cannot create directory ‘{}’: File exists",
    ],
)
def test_a_folder_that_is_made_again_is_there_for_its_output(said: str) -> None:
    spec = SPEC._replace(
        names=SPEC.names._replace(outputs={"model": "runs/best/", "log": "log.txt"})
    )
    for path in ("runs", "runs/best", "runs/best/", "/w/.recipe/attempts/a-1-1/runs/best"):
        expected = f"recipe creates the output directories before train starts: create {path} with `exist_ok=True`, or with `mkdir -p`"
        assert find_hint(Exit(1), f"Traceback\n{said.format(path)}\n", spec, HERE, {}) == expected
    for other in ("best", "runs/worse", "cache"):
        assert find_hint(Exit(1), said.format(other), spec, HERE, {}) == ""


def test_with_an_env_file_the_line_belongs_there() -> None:
    spec = SPEC._replace(env_files=[".env"])
    found = find_hint(Exit(1), FROZEN.format("OTHER"), spec, HERE, {})
    assert found == "OTHER is set neither in your shell nor in .env: add a line `OTHER=…` there"


def test_a_name_in_an_env_file_that_the_step_reads_is_not_to_be_added_again() -> None:
    spec = SPEC._replace(env_files=[".env"])
    log = FROZEN.format("OTHER")
    assert "add a line" in find_hint(Exit(1), log, spec, HERE, {}, {"OTHER"})
    assert "add `env_file: .env`" in find_hint(Exit(1), log, SPEC, HERE, {}, {"OTHER"})


@pytest.mark.parametrize(("name", "is_secret"), [("HF_TOKEN", True), ("COLOR", False)])
def test_a_secret_is_never_to_be_written_into_the_recipe(name: str, is_secret: bool) -> None:
    found = find_hint(Exit(1), FROZEN.format(name), SPEC, HERE, {})
    assert ("or set it with `env:" in found) != is_secret and "nor in the step" in found
    declared = SPEC._replace(unlisted={name: "key"})
    assert "`env:" not in find_hint(Exit(1), FROZEN.format(name), declared, HERE, {})


def test_a_refusal_counts_only_for_a_program_or_with_inputs() -> None:
    refused = "sh: 1: ./run.sh: Permission denied\n"
    assert find_hint(Exit(1), refused, SPEC, HERE._replace(given_files=False), {}) == ""
    assert "chmod +x run.sh" in find_hint(Exit(126), refused, SPEC, HERE, {})
    given = HERE._replace(given_files=True)
    assert "read-only" in find_hint(Exit(1), refused, SPEC, given, {})


def test_a_key_that_is_no_variable_says_nothing() -> None:
    assert hint("  File \"train.py\", line 3\n    row['TEXT']\nKeyError: 'TEXT'\n") == ""


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (
            HERE,
            "/w/.venv/bin/python (3.12.3) has no module torch: install it there, choose another Python with `--python PYTHON`",
        ),
        (
            HERE._replace(host="ssh gpu1"),
            "/w/.venv/bin/python (3.12.3) on ssh gpu1 has no module torch",
        ),
        (HERE._replace(lock="req.lock"), "the environment of req.lock has no module torch: add it"),
        (HERE._replace(image="debian:13"), "the image debian:13 has no Python module torch"),
    ],
)
def test_a_missing_module_says_which_python_it_was(ran: AttemptEnvironment, words: str) -> None:
    assert hint("ModuleNotFoundError: No module named 'torch.nn'", ran=ran).startswith(words)


@pytest.mark.parametrize(
    "log",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to",
        "RuntimeError: CUDA error: out of memory",
    ],
)
def test_a_full_gpu_is_distinguished_from_a_full_machine(log: str) -> None:
    assert hint(log).startswith("the GPU is out of memory")
    assert "resources: {memory" in hint("Killed", 137) and "resources: {memory" in find_hint(
        Exit(None, signal=9, reason="oom"), "", SPEC, HERE, {}
    )


@pytest.mark.parametrize("reason", ["timeout", "idle", "stopped", "lost"])
def test_what_we_killed_ourselves_did_not_run_out_of_memory(reason: str) -> None:
    assert find_hint(Exit(137, signal=9, reason=reason), "", SPEC, HERE, {}) == ""


def test_a_program_that_cannot_be_run_is_named() -> None:
    assert hint("recipe: cannot run ./x.sh: Permission denied", 126).startswith(
        "x.sh is not executable: run `chmod +x x.sh`"
    )
    assert hint("/a/1.sh: 1: ./x.sh: Permission denied", 126).startswith("x.sh is not executable")


def test_an_executable_that_may_not_run_is_on_a_disk_without_programs() -> None:
    log = "sh: 1: ./x.sh: Permission denied"
    ran = HERE._replace(executable=lambda path: path == "x.sh")
    assert "mounted noexec, so it cannot run x.sh: move the workspace" in hint(log, 126, ran=ran)
    there = hint(log, 126, ran=ran._replace(host="ssh box"))
    assert "noexec" in there and "set `root` to another disk" in there
    assert hint("recipe: cannot run nosuch: no such program in PATH", 127).startswith(
        "nosuch is not on the step's PATH: install it here"
    )
    assert hint("/a/1.sh: 1: nosuch: not found", 127).startswith("nosuch is not on the step's PATH")
    assert hint("nothing", 127) == hint("nothing", 126) == hint("", 1) == ""


def test_a_variable_of_the_env_file_that_is_there_is_taken_from_it() -> None:
    found = find_hint(Exit(1), FROZEN.format("WANDB_PROJECT"), SPEC, HERE, {}, {"WANDB_PROJECT"})
    assert found.startswith("WANDB_PROJECT is in .env: add `env_file: .env`")


def test_a_program_called_as_its_recipe_sees_it_is_named_as_the_step_does() -> None:
    log = "python: can't open file '/ws/.recipe/attempts/x-1-1/../src/train.py': [Errno 2] No such file or directory"
    assert find_hint(Exit(2), log, SPEC, HERE, {}).endswith(
        "write src/train.py instead of ../src/train.py"
    )
    assert find_hint(Exit(2), log, SPEC, HERE, {}).endswith(
        "write src/train.py instead of ../src/train.py"
    )


def _outside(log: str, **ran: Any) -> str:
    where = AttemptEnvironment("python", hidden=lambda path: path == "/data/x.csv", **ran)
    return find_hint(Exit(1), log, SPEC, where, {})


def test_a_path_that_a_sandbox_hides_is_named() -> None:
    said = "FileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv'"
    for log in (
        said,
        "cat: /data/x.csv: No such file or directory",
        "cat: '/data/x.csv': No such file or directory",
    ):
        assert _outside(log, sandbox="network").startswith("/data/x.csv is not declared")
        assert not _outside(log)
    assert not _outside(said.replace("x.csv", "none.csv"), sandbox="closed")


def test_a_network_that_a_sandbox_lacks_is_named() -> None:
    said = "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>"
    assert "has no network" in _outside(said, sandbox="closed")
    assert not _outside(said, sandbox="network")
