"""Step `evaluate` of sft@2 and cpt: perplexity before and after, as `sft_evaluate` finds it, in the arithmetic that the training chose."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import sft_evaluate
import text_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("data", "base", "model", "report", "micro-batch"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    made = text_record.read(Path(options.model))
    words = {**vars(options), **{name: made[name] for name in ("init", "precision", "seed")}}
    sys.argv = [sys.argv[0], *(part for name, value in words.items() for part in (f"--{name.replace('_', '-')}", str(value)))]
    sft_evaluate.main()


if __name__ == "__main__":
    main()
