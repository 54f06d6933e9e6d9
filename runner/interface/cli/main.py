"""The `recipe` command: which verb, with what, and how its end is told.  Imports a verb's module only when it is that verb."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code is its answer."""
    from . import parser

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return parser.run(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone: there is nobody to tell.
        sys.stderr.close()
        return 0
    except Exception as error:
        return _told(error, words)


def _told(error: Exception, words: Sequence[str]) -> int:
    from ...errors import Invalid, RecipeError

    if not isinstance(error, RecipeError):
        raise error
    if isinstance(error, Invalid):
        from ..diagnostics import render

        format = next((word.partition("=")[2] or words[n + 1] for n, word in enumerate(words) if word.startswith("--format")), "text")
        shown = format if format in ("json", "github", "sarif") else "text"
        print(render(error.problems, shown, sys.stderr.isatty()), file=sys.stderr if shown == "text" else sys.stdout)  # type: ignore[arg-type]
    else:
        print(f"recipe: {error}" + (f"\n  fix: {error.fix}" if error.fix else ""), file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
