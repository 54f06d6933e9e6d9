"""Write one layered DAG of trivial file steps in every tool's own format, so that all run the same work.

usage: dag.py DIR STEPS [--width W] [--seed S]
Each step checksums one to three files of the layer above into one output.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def layered(steps: int, width: int, seed: int) -> tuple[list[dict[str, object]], list[str]]:
    """`steps` steps, each {name, ins, out}, and the outputs that no step reads."""
    rng = random.Random(seed)
    above = [f"src/s{n}.txt" for n in range(width)]
    made: list[dict[str, object]] = []
    while len(made) < steps:
        layer = []
        for _ in range(min(width, steps - len(made))):
            ins = sorted(rng.sample(above, rng.randint(1, min(3, len(above)))))
            name = f"n{len(made)}"
            made.append({"name": name, "ins": ins, "out": f"out/{name}.txt"})
            layer.append(f"out/{name}.txt")
        above = layer
    used = {path for step in made for path in step["ins"]}  # type: ignore[attr-defined]
    return made, [str(step["out"]) for step in made if step["out"] not in used]


def write(root: Path, steps: int, width: int = 100, seed: int = 1) -> None:
    """Make `root` a workspace of this DAG for every tool: sources, Makefile, build.ninja, Snakefile, dodo.py, recipe.yaml."""
    (root / "src").mkdir(parents=True, exist_ok=True)
    (root / "out").mkdir(exist_ok=True)
    for n in range(width):
        (root / f"src/s{n}.txt").write_text(f"source {n} of seed {seed}\n")
    made, leaves = layered(steps, width, seed)
    rows = [
        (s["name"], s["ins"], s["out"], f"cat {' '.join(s['ins'])} | cksum > {s['out']}")
        for s in made
    ]  # type: ignore[arg-type]
    (root / "dag.json").write_text(json.dumps({"steps": made, "leaves": leaves}))
    (root / "Makefile").write_text(
        f"all: {' '.join(leaves)}\n"
        + "".join(f"{out}: {' '.join(ins)}\n\t@{run}\n" for _, ins, out, run in rows)
    )  # type: ignore[arg-type]
    (root / "build.ninja").write_text(
        "rule c\n command = cat $in | cksum > $out\n"
        + "".join(f"build {out}: c {' '.join(ins)}\n" for _, ins, out, _ in rows)
    )  # type: ignore[arg-type]
    rules = (
        f"rule {name}:\n    input: {_words(ins)}\n    output: {_words([out])}\n    shell: {json.dumps(run)}\n"
        for name, ins, out, run in rows
    )
    (root / "Snakefile").write_text(f"rule all:\n    input: {_words(leaves)}\n" + "".join(rules))
    (root / "dodo.py").write_text(
        "import json\nD = json.load(open('dag.json'))\nDOIT_CONFIG = {'verbosity': 0, 'reporter': 'zero'}\n"
        "def task_n():\n    for s in D['steps']:\n        yield {'name': s['name'], 'file_dep': s['ins'], 'targets': [s['out']],\n"
        "               'actions': ['cat ' + ' '.join(s['ins']) + ' | cksum > ' + s['out']]}\n"
    )
    steps_text = (
        f"  {name}:\n    run: {json.dumps(run)}\n    deps: {json.dumps(ins)}\n    outputs: {json.dumps([out])}\n"
        for name, ins, out, run in rows
    )
    (root / "recipe.yaml").write_text(
        "recipe: bench@1\nsummary: A layered DAG of trivial steps\nsteps:\n" + "".join(steps_text)
    )


def _words(paths: object) -> str:
    return json.dumps(paths)[1:-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    write(given.dir, given.steps, given.width, given.seed)
