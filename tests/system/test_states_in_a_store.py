"""A state that says `to: store` outlives its machine: another one resumes from the newest whole checkpoint that the shared store has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.moto import Moto
from tests.support import RECIPE, Space, until

TRAIN = """\
import os, pathlib, random, sys, time
state, out, gate = map(pathlib.Path, sys.argv[1:])
known = sorted(state.glob("step-*"), key=lambda path: int(path.name[5:]))
step, value = (int(known[-1].name[5:]), float(known[-1].joinpath("value").read_text())) if known else (0, 0.5)
print("from", step, flush=True)
while step < 40:
    step += 1
    value = random.Random(f"{step}{value}").random()
    if step % 10 == 0:
        new = state / f".new-{step}"
        new.mkdir()
        (new / "value").write_text(repr(value))
        new.rename(state / f"step-{step}")
    while step == 25 and gate.exists():
        time.sleep(0.05)
out.write_text(repr(value))
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


class Machine(Space):
    """A folder of its own on a machine of its own, with a shared store."""

    def __init__(
        self, root: Path, url: str, endpoint: str, *, to: str = "to: store, ", more: str = ""
    ) -> None:
        super().__init__(root)
        server = f'endpoint = "{endpoint}"\n' if endpoint else ""
        self.write(
            "recipe.toml",
            f'store = "team"\n[stores.team]\nurl = "{url}"\npush = true\n{more}{server}'
            if url
            else "",
        )
        self.write("train.py", TRAIN)
        gate = root.parent / "gate"
        self.recipe(f"""
steps:
  train:
    run: {sys.executable} train.py {{{{ state.ckpt }}}} {{{{ outputs.o }}}} {gate}
    code: [train.py]
    state: {{ckpt: {{{to}checkpoint: "step-*", every: 1s}}}}
    outputs: {{o: o.txt}}
""")


def test_a_training_goes_on_on_another_machine_when_its_own_is_lost(
    tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    bucket, gate = moto.bucket(), tmp_path / "gate"
    url = f"s3://{bucket}/team"
    gate.touch()
    lost = Machine(tmp_path / "lost", url, moto.endpoint)
    with subprocess.Popen(
        [*RECIPE, "run"], cwd=lost.root, start_new_session=True, stderr=subprocess.DEVNULL
    ) as process:
        notes = lambda: moto.s3.list_objects_v2(Bucket=bucket, Prefix="team/states/").get(  # noqa: E731
            "Contents", ()
        )
        until(lambda: bool(notes()), seconds=60)
        process.kill()
    other = Machine(tmp_path / "other", url, moto.endpoint)
    gate.unlink()
    other.run()
    logs = [path.read_text() for path in (other.root / ".recipe/runs").glob("*/train.*.log")]
    assert logs == ["from 20\n"]
    alone = Machine(tmp_path / "alone", "", "")
    alone.run()
    assert other.read("o.txt") == alone.read("o.txt")


def test_a_state_that_does_not_say_so_stays(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    Machine(tmp_path / "a", str(store), "", to="").run()
    assert not list(store.glob("states/*/*"))


def test_a_store_that_takes_checkpoints_has_those_of_every_state(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    Machine(tmp_path / "a", str(store), "", to="", more="checkpoints = true\n").run()
    assert list(store.glob("states/*/*"))


def test_a_store_that_is_only_read_gets_no_checkpoint_and_the_run_says_so(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    machine = Machine(tmp_path / "a", str(store), "")
    machine.write("recipe.toml", machine.read("recipe.toml").replace("push = true", "push = false"))
    code, _, err = machine.command("run")
    assert code == 0 and "is read-only" in err and not list(store.glob("states/*/*"))


def test_without_a_shared_store_it_runs_and_says_that_checkpoints_stay_here(tmp_path: Path) -> None:
    code, _, err = Machine(tmp_path / "a", "", "").command("run")
    assert code == 0 and "no shared store is set" in err


@pytest.mark.proof
def test_a_training_of_the_library_resumed_elsewhere_ends_in_the_same_bits(
    tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto.environ.items():
        monkeypatch.setenv(name, value)
    bucket = moto.bucket()
    run = [*RECIPE, "run", "sft", "--preset", "smoke", "--python", "current"]

    def made(root: Path, *, shared: bool = True, until_saved: bool = False) -> dict[str, bytes]:
        root.mkdir()
        store = f'store = "team"\n[stores.team]\nurl = "s3://{bucket}/team"\nendpoint = "{moto.endpoint}"\npush = true\ncheckpoints = true\n'
        (root / "recipe.toml").write_text(store if shared else "")
        with (
            (root / "said").open("w") as said,
            subprocess.Popen(run, cwd=root, start_new_session=True, stderr=said) as process,
        ):
            if until_saved:
                until(
                    lambda: bool(
                        moto.s3.list_objects_v2(Bucket=bucket, Prefix="team/states/").get(
                            "Contents", ()
                        )
                    ),
                    seconds=120,
                )
                process.kill()
                subprocess.run([*RECIPE, "cancel", "last"], cwd=root, check=True)
        return {
            path.name: path.read_bytes() for path in root.glob("out/sft@1/*/model/*.safetensors")
        }

    assert not made(tmp_path / "lost", until_saved=True)
    other = made(tmp_path / "other")
    assert "downloaded from the shared store team" in (tmp_path / "other/said").read_text()
    assert other and other == made(tmp_path / "alone", shared=False)
