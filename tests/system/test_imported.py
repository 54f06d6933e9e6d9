"""`recipe import` drafts a recipe of another tool's file that validates, runs, and is exact about what it depends on."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import yaml

from runner.interface.importing import from_sky
from runner.language import document
from tests.support import Space

DVC = """\
vars: [params.yaml]
stages:
  prepare:
    cmd: python src/prepare.py raw.txt data/prepared ${prepare.least}
    deps: [raw.txt, src/prepare.py]
    params: [prepare.least]
    outs: [data/prepared]
  train:
    cmd:
      - python src/train.py data/prepared model.txt
      - echo trained
    deps: [data/prepared, src/train.py]
    params:
      - train
      - other.json: [seed]
    outs:
      - model.txt: {persist: true}
    metrics: [metrics.json: {cache: false}]
  each:
    foreach: [us, de]
    do: {cmd: "cat model.txt > out/${item}.txt", deps: [model.txt], outs: ["out/${item}.txt"]}
artifacts: {m: {path: model.txt}}
"""
PREPARE = """\
import pathlib, sys
text, out, least = sys.argv[1:]
pathlib.Path(out).mkdir(parents=True, exist_ok=True)
pathlib.Path(out, "words").write_text(" ".join(word for word in open(text).read().split() if len(word) >= int(least)))
"""
TRAIN = """\
import json, pathlib, sys, yaml
data, out = sys.argv[1:]
rate, seed = yaml.safe_load(open("params.yaml"))["train"]["lr"], json.load(open("other.json"))["seed"]
pathlib.Path(out).write_text(f"{rate} {seed} " + pathlib.Path(data, "words").read_text())
pathlib.Path("metrics.json").write_text('{"loss": 1}')
"""


@pytest.fixture
def pipeline(space: Space) -> Space:
    space.write("dvc.yaml", DVC)
    space.write("params.yaml", "prepare: {least: 3}\ntrain: {lr: 0.1, epochs: 2}\nunused: 1\n")
    space.write("other.json", '{"seed": 7, "else": 8}')
    space.write("raw.txt", "a few words of text\n")
    space.write("src/prepare.py", PREPARE)
    space.write("src/train.py", TRAIN)
    space.write("dvc.lock", "stages: {prepare: {outs: [{path: data/prepared, md5: 0.dir}]}}")
    return space


def test_a_pipeline_of_dvc_runs_as_a_recipe_and_its_parameters_are_inputs(pipeline: Space) -> None:
    code, out, err = pipeline.command("import", "dvc.yaml", "mine")
    assert (code, out) == (0, "mine.yaml\n") and "next: recipe plan ./mine.yaml" in err
    assert (
        "model.txt stays between runs (`persist`)" in err
        and "`artifacts` in dvc.yaml was not converted" in err
    )
    pipeline.file = "mine.yaml"
    assert sorted(pipeline.run()) == ["each[item=de]", "each[item=us]", "prepare", "train"]
    assert pipeline.read("out/us.txt") == "0.1 7 few words text"
    assert pipeline.run() == []
    assert sorted(pipeline.run({"train_lr": 0.5})) == ["each[item=de]", "each[item=us]", "train"]
    pipeline.write("params.yaml", "prepare: {least: 3}\ntrain: {lr: 0.1, epochs: 2}\nunused: 2\n")
    assert pipeline.run({"train_lr": 0.5}) == []


def test_a_pipeline_in_a_folder_runs_in_that_folder(space: Space) -> None:
    space.write("recipe.toml", "")
    space.write("a/b/in.txt", "x")
    space.write(
        "a/dvc.yaml",
        "stages: {s: {wdir: b, cmd: cat in.txt ../p.txt > out.txt, deps: [in.txt, ../p.txt], outs: [out.txt]}}\n",
    )
    space.write("a/p.txt", "y")
    assert space.command("import", "a/dvc.yaml", "s")[:2] == (0, "a/s.yaml\n")
    assert space.command("run", "./a/s.yaml")[0] == 0
    assert space.read("a/b/out.txt") == "xy"


def test_what_conda_reads_is_refused_by_lock_with_what_to_do(space: Space) -> None:
    space.write("environment.yml", "dependencies: [pytorch]\n")
    code, _, err = space.command("lock", "environment.yml")
    assert (
        code == 2
        and "recipe lock does not support environment.yml" in err
        and "requirements.txt" in err
    )


SKY: dict[str, Any] = {
    "name": "Fine Tune",
    "resources": {
        "accelerators": "A100-80GB:8",
        "cpus": "16+",
        "memory": "64+",
        "disk_size": 512,
        "use_spot": True,
        "infra": "gcp",
    },
    "num_nodes": 2,
    "workdir": ".",
    "envs": {"MODEL": "tiny", "WHO": None},
    "secrets": {"HF_TOKEN": None},
    "file_mounts": {"/data/images": "s3://bucket/images", "/conf": "./conf"},
    "setup": "pip install x\n",
    "run": "cd x && torchrun --node_rank $SKYPILOT_NODE_RANK --nnodes ${SKYPILOT_NUM_NODES} train.py\necho $SKYPILOT_NODE_IPS\n",
    "service": {"port": 1},
}


def test_a_task_of_skypilot_becomes_a_step_and_what_is_left_is_named(space: Space) -> None:
    space.write("sky.yaml", json.dumps(SKY))
    space.write("train.py", "")
    space.write("conf/a", "")
    code, out, err = space.command("import", "sky.yaml")
    assert (code, out) == (0, "fine-tune.yaml\n")
    value = yaml.safe_load(space.read("fine-tune.yaml"))
    step = value["steps"]["fine_tune"]
    assert step["resources"] == {
        "gpus": 8,
        "gpu": "A100",
        "gpu_memory": "80GB",
        "cpus": 16,
        "memory": "64GB",
        "disk": "512GB",
    }
    assert (
        step["nodes"] == 2
        and step["code"] == ["train.py"]
        and step["deps"] == ["conf"]
        and step["pass_env"] == ["WHO"]
    )
    assert "--node_rank $NODE_RANK --nnodes ${NNODES}" in step["run"] and value["inputs"][
        "hf_token"
    ] == {"type": "secret", "env": "HF_TOKEN"}
    for words in (
        "$SKYPILOT_NODE_IPS is not set",
        'market = "spot" in [drivers.NAME]',
        "`resources.infra`",
        "`service` of the task",
        "`outputs`",
        "s3://bucket/images",
    ):
        assert words in err and words in space.read("fine-tune.yaml")
    assert space.command("validate", "fine-tune.yaml")[0] == 0


@pytest.mark.parametrize(
    ("accelerators", "gpus", "gpu", "said"),
    [
        ("A100", 1, "A100", ""),
        ("L4:0.5", 1, "L4", ""),
        ("RTX6000-Ada:2", 2, "RTX 6000 Ada", ""),
        ("{H100: 8}", 8, "H100", ""),
        ("{H100:8}", 8, "H100", ""),
        (
            "{H100:8, A100:4}",
            8,
            "H100",
            "requesting H100:8, the first of the accelerators H100:8, A100:4",
        ),
        (
            "{L4: 2, A100: 4}",
            2,
            "L4",
            "requesting L4:2, the first of the accelerators L4:2, A100:4",
        ),
        ("[L4, {T4: 2}]", 1, "L4", "requesting L4, the first of the accelerators L4, T4:2"),
        ("A100:many", 1, "A100", "A100:many has no valid number of GPUs: requesting 1"),
    ],
)
def test_the_first_of_several_accelerators_is_requested_and_named(
    space: Space, accelerators: str, gpus: int, gpu: str, said: str
) -> None:
    space.write("sky.yaml", f"name: t\nrun: echo\nresources:\n  accelerators: {accelerators}\n")
    code, _, err = space.command("import", "sky.yaml")
    found = yaml.safe_load(space.read("t.yaml"))["steps"]["t"]["resources"]
    assert (code, found) == (0, {"gpus": gpus, "gpu": gpu}), err
    assert said in err and ("requesting" in err) is bool(said)


@pytest.mark.parametrize("known", [["A100", "A100 80GB"], ["A100 80GB", "A100"]])
def test_the_gpu_whose_whole_name_matches_comes_before_its_family(known: list[str]) -> None:
    task = {"name": "t", "run": "echo", "resources": {"accelerators": "A100-80GB"}}
    made = from_sky("t", task, "", (), known)
    assert made.recipe["steps"]["t"]["resources"]["gpu"] == "A100 80GB"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("steps: {}", 3, "neither a dvc.yaml"),
        ("a: [", 3, "is not valid YAML"),
        ("- 1", 3, "neither a dvc.yaml"),
        (None, 3, "there is no file other.yaml"),
    ],
)
def test_what_is_neither_is_refused_and_nothing_is_written(
    space: Space, text: str | None, code: int, words: str
) -> None:
    if text is not None:
        space.write("other.yaml", text)
    before = sorted(path.name for path in space.root.iterdir())
    assert (found := space.command("import", "other.yaml"))[0] == code and words in found[2]
    assert sorted(path.name for path in space.root.iterdir()) == before


def test_a_recipe_that_is_there_is_not_replaced(pipeline: Space) -> None:
    pipeline.write("mine.yaml", "x")
    code, _, err = pipeline.command("import", "dvc.yaml", "mine")
    assert code == 3 and "already exists" in err and pipeline.read("mine.yaml") == "x"


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [
        ({"dvc.yaml": "stages: {a: {foreach: null, do: {cmd: x}}}"}, 0, "`foreach` of a is not a list"),
        ({"dvc.yaml": "vars: 5\nstages: {a: {foreach: [x], do: null}, b: null}"}, 0, "stage b is not a mapping"),
        ({"dvc.yaml": "stages: {a: {cmd: x, wdir: null, params: 5}}"}, 0, "reads 5 from params.yaml"),
        ({"dvc.yaml": "stages: {a: {cmd: x}}", "dvc.lock": "stages: {a: {outs: [{md5: 1.dir}, x]}, b: null}"}, 0, "next: "),
        ({"dvc.yaml": "stages: {a: {cmd: x, params: [p.json: ]}}", "p.json": "{"}, 3, "p.json is not valid JSON"),
        ({"dvc.yaml": "stages: {a: {cmd: x, params: [p.toml: ]}}", "p.toml": "a"}, 3, "p.toml is not valid TOML"),
        ({"dvc.yaml": "stages: {a: {cmd: !!int x}}"}, 3, "dvc.yaml is not valid YAML"),
        ({"sky.yaml": "{run: x, workdir: {url: y}, num_nodes: two, secrets: 5}"}, 0, "`num_nodes` of the task is not a number"),
    ],
)  # fmt: skip
def test_a_value_of_an_unexpected_type_is_named_in_a_note_or_refused(
    space: Space, files: dict[str, str], code: int, words: str
) -> None:
    for name, text in {"params.yaml": "lr: 1\n", **files}.items():
        space.write(name, text)
    found = space.command("import", next(iter(files)), "mine")
    assert found[0] == code and words in found[2], found
    assert (space.root / "mine.yaml").exists() == (code == 0)


def test_parameters_keep_the_types_that_dvc_reads(space: Space) -> None:
    """DVC reads YAML 1.2, and what is written here is read back so."""
    space.write("dvc.yaml", "stages: {t: {cmd: cp params.yaml m.txt, params: [lr, n, flag, tag, sha], outs: [m.txt]}}\n")  # fmt: skip
    space.write("params.yaml", "lr: 1e-5\nn: 010\nflag: yes\ntag: '1e5'\nsha: 12e4567\n")
    assert space.command("import", "dvc.yaml", "mine")[0] == 0
    assert space.command("validate", "mine.yaml")[0] == 0
    assert space.command("run", "mine.yaml")[0] == 0
    expected = {"lr": 1e-5, "n": 10, "flag": "yes", "tag": "1e5", "sha": "12e4567"}
    assert yaml.safe_load(space.read("m.txt")) == expected
    assert document.parse(space.read("m.txt"), "m.yaml").value == expected


RULES = {
    "target": "all",
    "rules": [
        {"name": "all", "input": [["", "total.txt"], ["", "up/b.txt"]], "output": [], "log": [], "params": [], "shell": None, "other": []},
        {"name": "upper", "input": [["data", "raw/{s}.txt"], ["code", "up.sh"]], "output": [["", "up/{s}.txt"]], "log": [["", "logs/{s}.log"]],
         "params": [["times", "3"]], "shell": "sh {input.code} {input.data} {params.times} {wildcards.s} > {output} 2> {log}", "other": []},
        {"name": "total", "input": [["", "up/a.txt"], ["", "up/b.txt"]], "output": [["out", "total.txt"]], "log": [], "params": [],
         "shell": "cat {input} > {output.out}; echo '{{}}'", "other": []},
        {"name": "spare", "input": [], "output": [["", "spare.txt"]], "log": [], "params": [], "shell": None, "other": ["script"]},
    ],
}  # fmt: skip
"""What Snakemake 9.27 says of a Snakefile with four rules."""


def test_a_snakefile_is_read_by_snakemake_when_asked_for_and_runs_as_a_recipe(space: Space) -> None:
    space.write("Snakefile", "rule all: ...\n")
    space.write("rules.json", json.dumps(RULES))
    for name, text in {
        "python": f"#!/bin/sh\ncat '{space.root}/rules.json'\n",
        "snakemake": f"#!{space.root}/bin/python\n",
        "up.sh": "cat $1; echo $2 $3; echo said >&2\n",
    }.items():
        space.write(name if name == "up.sh" else f"bin/{name}", text).chmod(0o755)
    for name in "ab":
        space.write(f"raw/{name}.txt", f"{name}\n")
    path = {"PATH": f"{space.root}/bin:{os.environ['PATH']}"}
    code, _, err = space.command("import", "Snakefile", "mine", env=path)
    assert code == 2 and "to read Snakefile, Snakemake executes it" in err and "--yes" in err
    assert not (space.root / "mine.yaml").exists()
    code, _, err = space.command("import", "Snakefile", "mine", "--yes", env=path)
    assert code == 0 and "rule spare is not required for all" in err
    assert space.command("validate", "./mine.yaml")[0] == 0
    code, _, err = space.command("run", "./mine.yaml")
    assert code == 0, err
    assert space.read("total.txt") == "a\n3 a\nb\n3 b\n"
    assert space.read("logs/a.log") == "said\n"


def test_without_snakemake_a_snakefile_is_refused_with_what_to_do(space: Space) -> None:
    space.write("Snakefile", "rule all: ...\n")
    code, _, err = space.command("import", "Snakefile", "--yes", env={"PATH": "/nowhere"})
    assert code == 2 and "requires Snakemake, which is not installed" in err
