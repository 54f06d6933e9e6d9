"""Step `data` of cpt: `sft_data`, with long text files cut into rows of tens of kilobytes, so that a part of one book can be held out."""

from __future__ import annotations

import argparse

import rows
import sft_data

LEAST = 1 << 16  # bytes of a row, at most, of a .txt file
BYTES = 16  # … for each token of a sequence: a row makes a few sequences, and little text stands beside a cut


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--max-length", type=int, default=0)
    options, _ = parser.parse_known_args()
    rows.BLOCK = max(LEAST, BYTES * options.max_length)
    sft_data.main()


if __name__ == "__main__":
    main()
