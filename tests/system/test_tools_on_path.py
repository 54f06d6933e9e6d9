"""A program on PATH is part of the key if a step asks for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.errors import CannotRun
from tests.support import Space


def test_another_version_of_a_tool_runs_the_steps_that_list_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = Space(tmp_path)
    tool = space.write("bin/mytool", "#!/bin/sh\necho 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    space.recipe(
        """
steps:
  a: {run: 'mytool > "{{ outputs.o }}"', tools: [mytool], outputs: {o: a.txt}}
  b: {run: 'mytool > "{{ outputs.o }}"', outputs: {o: b.txt}}
"""
    )
    assert sorted(space.run()) == ["a", "b"]
    assert space.run() == []
    tool.write_text("#!/bin/sh\necho 22\n")
    assert space.run() == ["a"]
    assert space.read("a.txt") == "22\n"
    tool.rename(tool.with_name("other"))
    with pytest.raises(CannotRun, match="a needs mytool, which is not on PATH"):
        space.run()


def test_a_tool_of_an_image_is_the_images(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe("image: a/b:1\nsteps: {a: {run: [echo], tools: [mytool]}}\n")
    assert "in an image with its own programs" in space.command("validate")[1]
