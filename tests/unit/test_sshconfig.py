"""What is taken from ~/.ssh/config: five words, first one wins, `Match` blocks never."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivers.sshconfig import Said, said

TEXT = """\
# a comment
User before
Host box *.lab !secret.lab
    HostName %h.example.org
    Port = 2200
    IdentityFile ~/.ssh/one
    IdentityFile "/keys/with space"
    IdentityFile none
Match host box
    User matched
    ProxyCommand evil
Host box
    ProxyJump a@hop:22,second
    HostName too-late
Host other
    ProxyJump none
    IdentityFile %d/keys/%h
Include more/*.conf
Host *
    Port 22
    User too-late
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / ".ssh" / "more").mkdir(parents=True)
    (tmp_path / ".ssh" / "config").write_text(TEXT)
    (tmp_path / ".ssh" / "more" / "x.conf").write_text(
        "Host included other\n HostName from-include\nInclude more/*.conf\n"
    )
    return tmp_path / ".ssh" / "config"


def test_the_first_value_wins_and_identities_add_up(config: Path, tmp_path: Path) -> None:
    assert said("box", config, tmp_path) == Said(
        "box.example.org",
        "before",
        2200,
        (f"{tmp_path}/.ssh/one", "/keys/with space"),
        "a@hop:22,second",
    )


def test_patterns_choose_and_one_with_an_exclamation_mark_forbids(
    config: Path, tmp_path: Path
) -> None:
    assert said("gpu.LAB", config, tmp_path).port == 2200
    assert said("secret.lab", config, tmp_path) == Said(user="before", port=22)


def test_included_files_count_where_they_stand_in_their_block(config: Path, tmp_path: Path) -> None:
    assert said("other", config, tmp_path) == Said(
        "from-include", "before", 22, (f"{tmp_path}/keys/other",), ""
    )
    assert (
        said("included", config, tmp_path).host == ""
    )  # the Include stands in the block of `other`


def test_no_file_says_nothing_and_a_port_that_is_none_is_reported(tmp_path: Path) -> None:
    assert said("box", tmp_path / "none", tmp_path) == Said()
    (tmp_path / "config").write_text("Port ssh\n")
    with pytest.raises(ValueError, match='"ssh" is not a port'):
        said("box", tmp_path / "config", tmp_path)
