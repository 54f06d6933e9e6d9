"""GPUs are assigned: no two steps of one login are on one card, however they are run, and a step sees its own and no other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import runner
from drivers import devices
from runner.errors import CannotRun
from runner.execution.terms import Settings
from tests.support import Space, until


def note(space: Space) -> str:
    """A command that writes down what its step sees."""
    return f'echo "$RECIPE_STEP ${{CUDA_VISIBLE_DEVICES-unset}}" >> {space.root}/log'


class Cards:
    """Two cards that no other test has, listed by an nvidia-smi of our own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2) -> None:
        self.uuids = [f"GPU-test-{os.urandom(6).hex()}" for _ in range(count)]
        folder.mkdir()
        program = folder / "nvidia-smi"
        lines = "".join(
            f"GPU {number}: NVIDIA T4 (UUID: {uuid})\n" for number, uuid in enumerate(self.uuids)
        )
        program.write_text(
            f"#!/bin/sh\ncase $1 in -L) cat <<'E'\n{lines}E\n;; --query-gpu=name,*) printf 'NVIDIA T4, 15360\\n%.0s' {' '.join('x' * count)} ;; esac\n"
        )
        program.chmod(0o755)
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def locks(self) -> list[Path]:
        return [Path(f"/tmp/recipe-{os.geteuid()}/gpus/{uuid}.lock") for uuid in self.uuids]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    made = Cards(tmp_path / "cards", monkeypatch)
    yield made
    for lock in made.locks():
        lock.unlink(missing_ok=True)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """What steps wait for: open it with `go`."""
    return tmp_path / "gate"


def noted(space: Space) -> dict[str, str]:
    """What each step saw, in the order in which they began."""
    path = space.root / "log"
    return (
        dict(line.split(" ", 1) for line in path.read_text().splitlines()) if path.exists() else {}
    )


def steps(space: Space, gpus: object = 1, *, names: str = "ab", wait: Path | None = None) -> None:
    """Steps that note which GPUs they see, wait for the gate, and make a file."""
    hold = f"until [ -e {wait} ]; do sleep 0.02; done; " if wait else ""
    resources = "" if gpus is None else f", resources: {{gpus: {gpus}}}"
    space.recipe(
        "steps:\n"
        + "".join(
            f"  {name}: {{run: '{note(space)}; {hold}echo {name} > {name}.txt', outputs: {{o: {name}.txt}}{resources}}}\n"
            for name in names
        )
    )


def test_steps_that_run_at_once_see_different_cards(
    space: Space, cards: Cards, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    steps(space, wait=gate)
    worker = space.start("run", "--allow", "all", "-j2")
    until(lambda: len(noted(space)) == 2)
    gate.touch()
    assert worker.wait(60) == 0
    assert sorted(noted(space).values()) == ["0", "1"]


def test_what_is_assigned_is_in_the_words_of_the_caller(
    space: Space, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{cards.uuids[1]},{cards.uuids[0][:-2]}")
    steps(space, 2, names="a")
    space.run()
    assert noted(space) == {"a": os.environ["CUDA_VISIBLE_DEVICES"]}


def test_without_the_variable_cards_are_listed_and_numbered_as_the_tool_does(
    space: Space, cards: Cards
) -> None:
    space.recipe(
        "steps: {a: {run: 'echo $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES > o', outputs: {o: o}, resources: {gpus: 2}}}\n"
    )
    space.run()
    assert space.read("o") == "PCI_BUS_ID 0,1\n"


def test_a_step_that_asks_for_none_sees_none_and_one_that_says_nothing_sees_what_the_caller_sees(
    space: Space, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(space, 0)
    space.run()
    assert noted(space) == {"a": "", "b": ""}
    steps(space, None, names="cd")
    space.run()
    assert {noted(space)[name] for name in "cd"} == {"unset"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    steps(space, None, names="ef")
    space.run()
    assert {noted(space)[name] for name in "ef"} == {"1"}


@pytest.mark.parametrize(("gpus", "share"), [(None, "2"), (0, "0"), (1, "1")])
def test_host_gpus_is_the_share_of_the_step_and_not_in_its_key(
    space: Space, cards: Cards, gpus: int | None, share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = "" if gpus is None else f", resources: {{gpus: {gpus}}}"
    space.recipe(
        f"steps: {{a: {{run: 'echo {{{{ host.gpus }}}} > o', outputs: {{o: o}}{resources}}}}}\n"
    )
    space.run()
    assert space.read("o") == f"{share}\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert space.run() == []


def test_accelerate_starts_a_process_for_each_gpu_of_the_step(space: Space, cards: Cards) -> None:
    from runner.hosts.place.capacity import Capacity
    from runner.hosts.place.launch import count_processes
    from runner.storage.workspace import Workspace

    with Workspace.open(space.root) as ws:
        there = Capacity(
            ws.machine(), lambda: devices.here(ws.environ), None, free=cast(Any, None)
        )  # nothing is started
        assert [
            count_processes({}, {"host": there.template_host(share)}) for share in (None, 1, 2, 0)
        ] == [
            2,
            1,
            2,
            1,
        ]


def test_more_than_there_are_is_refused_before_anything_starts(space: Space, cards: Cards) -> None:
    steps(space, 3, names="a")
    with pytest.raises(CannotRun, match=r"a requires 3 GPU\(s\), but this machine has 2"):
        space.run()


def test_a_fraction_of_a_gpu_is_refused(space: Space) -> None:
    steps(space, 0.5, names="a")
    (problem,) = space.problems()
    assert (
        problem.message == '"resources.gpus" of step "a" must be a whole number, not the number 0.5'
    )


def test_two_workspaces_are_never_on_one_card(tmp_path: Path, cards: Cards) -> None:
    """Three workspaces, six steps, two cards: each step notes when it began and ended, and where."""
    spaces = [Space(tmp_path / name) for name in ("one", "two", "three")]
    diary = tmp_path / "diary"
    for space in spaces:
        work = f'echo "$CUDA_VISIBLE_DEVICES begin" >> {diary}; sleep 0.03; echo "$CUDA_VISIBLE_DEVICES end" >> {diary}'
        space.recipe(
            "steps:\n"
            + "".join(
                f"  s{n}: {{run: '{work}; echo {n} > {n}', outputs: {{o: '{n}'}}, resources: {{gpus: 1}}}}\n"
                for n in range(2)
            )
        )
    workers = [space.start("run", "--allow", "all", "-j4") for space in spaces]
    for worker in workers:
        _, words = worker.communicate(timeout=60)
        assert worker.returncode == 0, words
    lines = [line.split() for line in diary.read_text().splitlines()]
    assert len(lines) == 12 and {card for card, _ in lines} <= {"0", "1"}
    for card in "01":
        assert [what for each, what in lines if each == card] == ["begin", "end"] * (
            sum(each == card for each, _ in lines) // 2
        )


def test_a_run_waits_for_cards_that_another_holds_says_so_once_and_starts_when_one_is_free(
    tmp_path: Path, cards: Cards, gate: Path
) -> None:
    one, two = Space(tmp_path / "one"), Space(tmp_path / "two")
    steps(one, wait=gate)
    steps(two, names="c")
    first = one.start("run", "--allow", "all", "-j2")
    until(lambda: len(noted(one)) == 2)
    second = two.start(
        "run",
        "--allow",
        "all",
        stdout=(two.root / "out").open("w"),
        stderr=(two.root / "err").open("w"),
    )
    until(lambda: "waiting for a GPU: 2 of 2 are in use by another run" in two.read("err"))
    assert noted(two) == {}
    gate.touch()
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert noted(two)["c"] in ("0", "1") and two.read("err").count("waiting for a GPU") == 1


def test_a_run_that_waits_for_a_card_can_be_interrupted(
    tmp_path: Path, cards: Cards, gate: Path
) -> None:
    one, two = Space(tmp_path / "one"), Space(tmp_path / "two")
    steps(one, 2, names="a", wait=gate)
    steps(two, names="c")
    first = one.start("run", "--allow", "all")
    until(lambda: noted(one))
    second = two.start("run", "--allow", "all", stderr=(two.root / "err").open("w"))
    until(lambda: "waiting for a GPU" in two.read("err"))
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 130
    gate.touch()
    assert first.wait(60) == 0 and noted(two) == {}


def test_a_killed_worker_leaves_its_card_to_its_step_and_the_next_run_takes_both_up(
    tmp_path: Path, cards: Cards, gate: Path
) -> None:
    one, two = Space(tmp_path / "one"), Space(tmp_path / "two")
    steps(one, 2, names="a", wait=gate)
    steps(two, names="c")
    first = one.start("run", "--allow", "all")
    until(lambda: noted(one))
    first.kill()
    first.wait()
    second = two.start("run", "--allow", "all", stderr=(two.root / "err").open("w"))
    until(lambda: "waiting for a GPU" in two.read("err"))
    again = one.start("run", "--allow", "all", "-v", stderr=(one.root / "err").open("w"))
    until(lambda: "a: started" in one.read("err"))
    gate.touch()
    assert (again.wait(60), second.wait(60)) == (0, 0)
    assert (one.root / "log").read_text().splitlines() == ["a 0,1"], "it was not begun again"
    assert "waiting" not in one.read("err")


def test_the_end_of_a_step_and_of_all_that_it_left_frees_its_card(
    space: Space, cards: Cards, gate: Path
) -> None:
    """The step is killed -9; what it started in the background is ended with it, and the retry finds the card free."""
    space.recipe(
        f"steps: {{a: {{run: '{note(space)}; [ -e {gate} ] || {{ echo x > {gate}; sleep 600 & kill -9 $$; }}; echo x > o', outputs: {{o: o}},"
        " resources: {gpus: 2}, retries: {failure: 1}}}\n"
    )
    space.run()
    assert (space.root / "log").read_text().splitlines() == ["a 0,1", "a 0,1"]


def test_a_step_that_asks_for_a_gpu_is_never_begun_before_its_turn(
    space: Space, cards: Cards
) -> None:
    steps(space, names="abcdefgh")
    space.run(settings=Settings(jobs=2))
    assert set(noted(space).values()) <= {"0", "1"} and len(noted(space)) == 8


def test_no_card_is_asked_after_where_no_step_needs_to_know(space: Space, cards: Cards) -> None:
    (cards.folder / "nvidia-smi").write_text(f"#!/bin/sh\ntouch {space.root}/asked\n")
    space.recipe("steps: {a: {run: 'echo {{ run.id }} > o', outputs: {o: o}}}\n")
    space.run()
    assert not (space.root / "asked").exists()


def test_doctor_lists_the_cards_that_steps_are_given(space: Space, cards: Cards) -> None:
    _, out, _ = space.command("doctor", "--json", env={"CUDA_VISIBLE_DEVICES": "1"})
    (finding,) = [each for each in json.loads(out) if each["what"] == "gpus"]
    assert finding["found"].startswith("1 (") and finding["found"].endswith(
        f"CUDA_VISIBLE_DEVICES=1): 1 is {cards.uuids[1]}"
    )


# --- elsewhere


@pytest.fixture
def away(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """The cards as a loopback host has them: its PATH is the system's."""
    monkeypatch.setattr(os, "defpath", f"{cards.folder}:{os.defpath}")
    return cards


def test_steps_on_a_host_are_given_its_cards(space: Space, away: Cards) -> None:
    space.write("recipe.toml", "[drivers.loopback]\nslots = 2\n")
    space.recipe(
        "steps:\n"
        + "".join(
            f"  {n}: {{run: 'echo $CUDA_VISIBLE_DEVICES {{{{ host.gpus }}}} > {n}; sleep 0.3', outputs: {{o: {n}}}, resources: {{gpus: 1}}}}\n"
            for n in "ab"
        )
        + "  none: {run: 'echo \"[$CUDA_VISIBLE_DEVICES]\" > none', outputs: {o: none}, resources: {gpus: 0}}\n"
    )
    space.run(settings=Settings(jobs=2, driver="loopback"))
    assert (
        sorted([space.read("a"), space.read("b")]) == ["0 1\n", "1 1\n"]
        and space.read("none") == "[]\n"
    )


def test_nodes_on_one_machine_are_given_different_cards_or_are_refused(
    space: Space, away: Cards
) -> None:
    """Its hosts have the same cards, and a node that waited for the other's would wait for ever."""
    space.write("recipe.toml", "[drivers.loopback]\nhosts = 2\n")
    recipe = "steps: {{{s}: {{nodes: 2, run: 'echo $CUDA_VISIBLE_DEVICES', resources: {{gpus: {gpus}}}}}}}\n"
    space.recipe(recipe.format(s="s", gpus=1))
    space.run(settings=Settings(driver="loopback"))
    assert [space.command("logs", "s", "--node", rank)[1] for rank in "01"] == ["0\n", "1\n"]
    space.recipe(recipe.format(s="t", gpus=2))
    with pytest.raises(
        CannotRun,
        match=r"t requires 2 GPU\(s\) on each of 2 nodes, but all hosts of loopback are one machine with GPUs for 1",
    ):
        space.run(settings=Settings(driver="loopback"))


def test_a_host_and_this_machine_never_give_out_one_card(
    tmp_path: Path, away: Cards, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Space(tmp_path / "one"), Space(tmp_path / "two")
    steps(one, wait=gate)
    first = one.start("run", "--allow", "all", "-j2")
    until(lambda: len(noted(one)) == 2)
    two.recipe(
        "steps: {c: {run: 'echo $CUDA_VISIBLE_DEVICES > c', outputs: {o: c}, resources: {gpus: 2}}}\n"
    )
    words: list[str] = []

    def say(_: object, text: str) -> None:
        words.append(text)
        gate.touch()

    monkeypatch.setattr(runner._Calls, "say", say)
    two.run(settings=Settings(driver="loopback"))
    assert two.read("c") == "0,1\n" and first.wait(60) == 0
    assert words == ["waiting for 2 GPUs on loopback host-1: 2 of 2 are in use by another run"]
