"""What the lines of an env_file mean."""

from __future__ import annotations

import pytest

from runner.survey.env_files import parse_env


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A=1\nB=\n", {"A": "1", "B": ""}),
        ("export A = x y  # words\n\n# a line\nB=a#b", {"A": "x y", "B": "a#b"}),
        ("A='$HOME `id` \\n' # literal\nB=$HOME", {"A": "$HOME `id` \\n", "B": "$HOME"}),
        (
            'A="two\\nlines \\"q\\" \\\\"\r\nB="really\ntwo"\r\n',
            {"A": 'two\nlines "q" \\', "B": "really\ntwo"},
        ),
        ("\ufeffA=1\nA=2", {"A": "2"}),
        ("URL=http://x/?a=b", {"URL": "http://x/?a=b"}),
        ("", {}),
    ],
)
def test_lines_are_read_and_nothing_is_expanded(text: str, found: dict[str, str]) -> None:
    assert parse_env(text) == found


@pytest.mark.parametrize(
    "line", ["NAME", "1A=x", "A='open", 'A="open', "A='x' y", "A B=x", "A=x\0", "=x"]
)
def test_a_line_that_is_none_is_named_and_not_shown(line: str) -> None:
    with pytest.raises(ValueError, match=r"^line 3 is not NAME=value$"):
        parse_env(f"A=1\n\n{line}\n")
