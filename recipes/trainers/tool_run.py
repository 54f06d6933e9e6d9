"""Find the training tool that a recipe wraps, or say what to do without it; start it, and pass on what ends it.  Knows none of its settings."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A program of others: what people call it, where Python has it, the command that starts it, and how one gets it."""

    name: str
    module: str
    command: str
    install: str


AXOLOTL = Tool("axolotl", "axolotl", "axolotl", "pip install axolotl in a Python 3.12 environment beside a CUDA build of torch")
UNSLOTH = Tool(
    "unsloth", "unsloth_cli", "unsloth", "pip install unsloth 'unsloth[studio]' beside a CUDA build of torch; its command needs the studio extra"
)
PRIME_RL = Tool(
    "prime-rl",
    "prime_rl",
    "rl",
    "git clone https://github.com/PrimeIntellect-ai/prime-rl /opt/prime-rl, there `uv sync --all-extras` with Python 3.12, then "
    "launcher=uv,run,--project,/opt/prime-rl,rl; it is not on PyPI",
)


AI_TOOLKIT = Tool(
    "ai-toolkit",
    "toolkit",
    "run.py",
    "git clone https://github.com/ostris/ai-toolkit /opt/ai-toolkit, there `python3 -m venv venv`, torch for your CUDA and `venv/bin/pip install -r "
    "requirements.txt`, then launcher=/opt/ai-toolkit/venv/bin/python,/opt/ai-toolkit/run.py; it is not on PyPI",
)


def version(tool: Tool) -> str | None:
    """The version of the tool in this Python; None when it is not here."""
    if importlib.util.find_spec(tool.module) is None:
        return None
    try:
        return importlib.metadata.version(tool.name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def absent(tool: Tool, if_missing: str, what: str, report: Path) -> None:
    """Say that the tool is not here: see `undone`."""
    here = f" in the Python of this step ({sys.executable})" if if_missing == "fail" else ""
    undone(f"{what}: {tool.name} is not installed{here}", tool.install, if_missing, report)


def undone(said: str, remedy: str, if_missing: str, report: Path) -> None:
    """Say what keeps the tool from running.  With `if_missing` fail this ends the program; with report it is written down, and that is no failure."""
    if if_missing == "fail":
        sys.exit(f"{said}; {remedy}")
    write(report, {"trained": False, "said": said, "remedy": remedy})
    print(f"{said}; {remedy}")


def write(report: Path, told: dict[str, Any]) -> None:
    report.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def start(argv: Sequence[str], on_line: Callable[[str], None] | None = None) -> None:
    """Run the tool to its end.  SIGTERM and SIGINT go on to it, so that it may save; it failing ends this program as it ended.

    `on_line` is called with each line that it prints, and each state of a progress bar; all of it is printed, too.
    """
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if on_line else {}
    process = subprocess.Popen(list(argv), env={**os.environ, "PYTHONUNBUFFERED": "1"}, **streams)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: process.send_signal(received))
    if on_line:
        assert process.stdout is not None
        rest = b""
        while data := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
            # A progress bar is drawn anew after a carriage return.
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                on_line(line.decode(errors="replace"))
    code = process.wait()
    if code < 0:
        # Who started us has to see the signal, not a number: a stop is no failure.
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        sys.exit(f"{Path(argv[0]).name} ended with exit code {code}; what it said stands above")


def found(command: Sequence[str]) -> bool:
    """Whether the first word of a command is a program here."""
    return shutil.which(command[0]) is not None
