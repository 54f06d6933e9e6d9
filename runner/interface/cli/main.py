"""Entry point of the `recipe` command: execute a command line and report errors."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from ...errors import Invalid, RecipeError

_OBJECTS: Final = 100_000
"""New objects between two garbage collections.  A short command ends before the first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Execute a command line and return its exit code."""
    gc.set_threshold(_OBJECTS)
    atexit.register(gc.freeze)  # Python's collection at exit would visit all objects in vain
    _open_streams()
    words = sys.argv[1:] if argv is None else argv
    code = _flush(_answer(list(words)))
    # If a KeyboardInterrupt left an `exec`, for example that of a dataclass, Python exits by
    # SIGINT. Another `exec` resets this.
    exec("")  # noqa: S102
    return code


def _answer(words: list[str]) -> int:
    try:
        from . import verbs

        if words[:1] == ["__complete"]:
            from .completion import answer

            return answer(words[1:])
        return verbs.run(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _ignore_closed_stdout()
    except SystemExit as end:  # invalid command line, or --help
        return end.code if isinstance(end.code, int) else 0
    except Exception as error:
        return explain(error, words)


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null, and filter the output to terminals.

    Otherwise the next opened file would get the descriptor of the closed stream. Terminals get
    printable text and recipe's own colors only.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty():
            from ..tail import SafeTerminal

            setattr(sys, name, SafeTerminal(stream))


def _flush(code: int) -> int:
    """Flush standard output while errors can still be reported, and return the exit code."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _ignore_closed_stdout() or code
    except OSError as error:
        _discard_stdout()
        _write_error(f"recipe: cannot write the output: {error.strerror}\n")
        return code or 5
    return code


def _ignore_closed_stdout() -> int:
    """Discard further output after the reader of stdout has exited (EPIPE), and return 0."""
    _discard_stdout()
    return 0


def _discard_stdout() -> None:
    # Python flushes stdout again at exit, and would print an error.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def explain(error: Exception, words: Sequence[str] = ()) -> int:
    """Print an error, Invalid in the requested `--format`, and return its exit code.

    Errors other than RecipeError and OSError are raised again.
    """
    from ...planning.ids import readable

    if isinstance(error, OSError):  # disk, network or system limit: never a bug of recipe
        if error.strerror is None:
            raise error
        place = f"{error.filename}: " if error.filename else ""
        _write_error(f"recipe: {place}{error.strerror}\n")
        return 5
    if not isinstance(error, RecipeError):
        raise error
    if isinstance(error, Invalid):
        from ..diagnostics import render

        format = _requested_format(words)
        shown = format if format in ("json", "github", "sarif") else "text"
        text = render(error.problems, shown, sys.stderr.isatty())  # type: ignore[arg-type]
        if shown == "text":
            _write_error(text)
        else:
            sys.stdout.write(text)
    else:
        fix = f"\n  fix: {error.fix}" if error.fix else ""
        _write_error(readable(f"recipe: {error}{fix}") + "\n")
    return error.exit_code


def _requested_format(words: Sequence[str]) -> str:
    """Return the value of `--format` on the command line, otherwise `text`."""
    # After `--`, `recipe show` takes `--format` for an input, so that no value may follow it.
    for word, following in pairwise([*words, "text"]):
        if word == "--format":
            return following
        if word.startswith("--format="):
            return word.removeprefix("--format=")
    return "text"


def _write_error(text: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # stderr may go to a full disk; the exit code still reports the error
        sys.stderr.write(text)
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
