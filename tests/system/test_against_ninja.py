"""What runs after an edit, held against ninja (`restat`) and against a ten-line model of content and memory.

Ninja guesses from times and remembers the last build; we look at content and remember every build.  So of what ninja runs we run a part, and the
model says which: a step whose command and inputs have never been seen together.  After every edit both trees hold what a clean build would.

`RECIPE_NINJA_SEQUENCES` is how many random sequences of edits are tried (default 40), `RECIPE_NINJA_SEED` where they begin.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support import Space, until

SEQUENCES = int(os.environ.get("RECIPE_NINJA_SEQUENCES", "40"))
SEED = int(os.environ.get("RECIPE_NINJA_SEED", "0"))
EDITS = 3
SHARED = 25
"""Sequences that share a workspace, each in a folder of its own: its supervisor and its store are started once."""
NINJA = shutil.which("ninja", path=os.path.dirname(sys.executable)) or "ninja"


@dataclass
class Step:
    """`out = (salt + 1·in0 + 3·in1 + …) mod modulus`: small numbers, so that different inputs often make the same output."""

    id: str
    salt: int
    modulus: int
    needs: list[str]  # sources and steps
    mentions: set[str] = field(
        default_factory=set
    )  # of these, the ones it has by `{{ steps.x.o }}` and not by `deps`


@dataclass
class World:
    """A DAG and the content of its sources: what both tools are told."""

    sources: dict[str, int]
    steps: dict[str, Step]  # in topological order

    def built(self, memory: set[tuple[object, ...]]) -> tuple[dict[str, int], set[str]]:
        """What a build must leave, and what it must execute when it remembers `memory`, which learns."""
        values = dict(self.sources)
        executed = set()
        for step in self.steps.values():
            values[step.id] = (
                step.salt + sum((2 * n + 1) * values[need] for n, need in enumerate(step.needs))
            ) % step.modulus
            seen = (
                step.id,
                step.salt,
                step.modulus,
                tuple((need, need in step.mentions, values[need]) for need in step.needs),
            )
            if seen not in memory:
                memory.add(seen)
                executed.add(step.id)
        return {id: values[id] for id in self.steps}, executed


def _arithmetic(step: Step) -> str:
    terms = "".join(f" + {2 * n + 1} * v{n}" for n in range(len(step.needs)))
    return f"$(( ({step.salt}{terms}) % {step.modulus} ))"


class Ours:
    def __init__(self, space: Space, folder: str) -> None:
        self.space, self.folder = space, folder

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def build(self, world: World) -> set[str]:
        steps = {}
        for step in world.steps.values():
            reads = [
                f"read v{n} < {{{{ steps.{need}.o }}}}"
                if need in step.mentions
                else f"read v{n} < {self.path(need)}"
                for n, need in enumerate(step.needs)
            ]
            steps[step.id] = {
                "run": "; ".join([*reads, f"echo {_arithmetic(step)} > {self.path(step.id)}"]),
                "deps": [self.path(need) for need in step.needs if need not in step.mentions],
                "outputs": {"o": self.path(step.id)},
            }
        self.space.file = self.path("recipe.yaml")
        self.space.recipe({"steps": steps}, name=self.space.file)
        ran = self.space.run()
        assert len(ran) == len(set(ran))
        return set(ran)


class Ninjas:
    """The same DAG for ninja.  Commands leave an output alone that would not change, which is what `restat` asks for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def build(self, world: World) -> set[str]:
        lines = ["rule step", "  command = $cmd", "  restat = 1"]
        for step in world.steps.values():
            reads = [f"read v{n} < {need}" for n, need in enumerate(step.needs)]
            command = "; ".join(
                [
                    *reads,
                    f"new={_arithmetic(step)}",
                    "old=",
                    f"[ ! -e {step.id} ] || read old < {step.id}",
                    f'[ "$new" = "$old" ] || echo $new > {step.id}',
                    f"echo {step.id} >> ran",
                ]
            )
            lines += [
                f"build {step.id}: step {' '.join(step.needs)}",
                f"  cmd = {command.replace('$', '$$')}",
            ]
        (self.root / "build.ninja").write_text("\n".join(lines) + "\n")
        (self.root / "ran").write_text("")
        done = subprocess.run(
            [NINJA, "-C", str(self.root), "-j2"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        return set((self.root / "ran").read_text().split())


class Pair:
    """One world, built by both."""

    def __init__(self, space: Space, folder: str, ninja: Path, chance: random.Random) -> None:
        self.ours, self.ninjas, self.chance = Ours(space, folder), Ninjas(ninja), chance
        self.memory: set[tuple[object, ...]] = set()
        self.newest = 0
        self.made = 0
        sources = {f"f{n}": chance.randrange(6) for n in range(chance.randint(2, 4))}
        self.world = World(sources, {})
        for _ in range(chance.randint(3, 8)):
            self._add_step()
        for name, value in sources.items():
            self._put(name, value)
        self.build("at first")

    # -- edits

    def edit(self) -> str:
        """Make one random edit in both trees; say what it was."""
        world, chance = self.world, self.chance
        step = chance.choice(list(world.steps.values()))
        source = chance.choice(list(world.sources))
        kind = chance.choice(
            (
                "content",
                "content",
                "revert",
                "touch",
                "delete",
                "command",
                "add edge",
                "remove edge",
                "add step",
                "remove step",
            )
        )
        if kind == "content":
            world.sources[source] = chance.randrange(6)
            self._put(source, world.sources[source])
        elif kind == "revert":
            before = world.sources[source]
            world.sources[source] = before + 1
            self._put(source, before + 1)
            self.build(f"before the return of {source}")
            world.sources[source] = before
            self._put(source, before)
        elif kind == "touch":
            self._put(source, world.sources[source])
        elif kind == "delete":
            (self.ours.space.root / self.ours.path(step.id)).unlink()
            (self.ninjas.root / step.id).unlink()
        elif kind == "command":
            step.salt += chance.choice((1, step.modulus))  # the second one computes the same
        elif kind == "add edge":
            earlier = list(world.sources) + list(world.steps)[: list(world.steps).index(step.id)]
            need = chance.choice(earlier)
            if need not in step.needs:
                self._need(step, need)
        elif kind == "remove edge" and len(step.needs) > 1:
            step.needs.remove(gone := chance.choice(step.needs))
            step.mentions.discard(gone)
        elif kind == "add step":
            self._add_step()
        elif kind == "remove step" and len(world.steps) > 2:
            del world.steps[step.id]
            for other in world.steps.values():
                if step.id in other.needs:
                    other.needs.remove(step.id)
                    other.mentions.discard(step.id)
                    if not other.needs:
                        self._need(other, source)
        return f"{kind} {step.id} {source}"

    def _add_step(self) -> None:
        step = Step(f"s{self.made}", self.chance.randrange(10), self.chance.randint(2, 5), [])
        self.made += 1
        earlier = [*self.world.sources, *self.world.steps]
        for need in self.chance.sample(earlier, min(len(earlier), self.chance.randint(1, 3))):
            self._need(step, need)
        self.world.steps[step.id] = step

    def _need(self, step: Step, need: str) -> None:
        step.needs.append(need)
        if need not in self.world.sources and self.chance.random() < 0.5:
            step.mentions.add(need)

    def _put(self, name: str, value: int) -> None:
        """Write a source in both trees, visibly later than everything there: ninja goes by times."""
        self.ours.space.write(self.ours.path(name), f"{value}\n")
        path = self.ninjas.root / name

        def written() -> bool:
            path.write_text(f"{value}\n")
            return path.stat().st_mtime_ns > self.newest

        until(written)

    # -- builds

    def build(self, after: str) -> None:
        expected, must = self.world.built(self.memory)
        theirs = self.ninjas.build(self.world)
        ours = self.ours.build(self.world)
        assert ours == must, f"{after}: the model says {sorted(must)}, we ran {sorted(ours)}"
        assert ours <= theirs, f"{after}: ninja left out {sorted(ours - theirs)}"
        for id, value in expected.items():
            assert self.ours.space.read(self.ours.path(id)) == f"{value}\n", f"{after}: {id}"
            assert (self.ninjas.root / id).read_text() == f"{value}\n", f"{after}: {id}, by ninja"
        self.newest = max(path.stat().st_mtime_ns for path in self.ninjas.root.iterdir())

    def clean(self) -> None:
        """A build from nothing, elsewhere, leaves the same bytes as all these edits did."""
        fresh = Ours(self.ours.space, self.ours.folder + "-clean")
        for name, value in self.world.sources.items():
            fresh.space.write(fresh.path(name), f"{value}\n")
        assert fresh.build(self.world) == set(self.world.steps)
        for id in self.world.steps:
            assert fresh.space.read(fresh.path(id)) == self.ours.space.read(self.ours.path(id))


@pytest.mark.longer
def test_after_any_edit_we_run_what_content_demands_and_never_more_than_ninja(
    tmp_path: Path,
) -> None:
    space = Space(tmp_path / "space0")
    for number in range(SEED, SEED + SEQUENCES):
        if (number - SEED) % SHARED == 0:
            shutil.rmtree(space.root)
            space = Space(tmp_path / f"space{number}")
        chance = random.Random(number)
        done: list[str] = []
        try:
            pair = Pair(space, f"d{number}", tmp_path / f"n{number}", chance)
            for _ in range(EDITS):
                done.append(pair.edit())
                pair.build(done[-1])
            if number % 8 == 0:
                pair.clean()
        except AssertionError as error:
            raise AssertionError(
                f"RECIPE_NINJA_SEED={number}: {'; '.join(done)}: {error}"
            ) from error
        shutil.rmtree(tmp_path / f"n{number}")
