"""A document becomes a Recipe whose parts are parsed once, or every problem it has, each at its place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import Invalid
from runner.language import document, library, parse
from runner.language.recipe import (
    GitCode,
    Limits,
    Metrics,
    Output,
    Recipe,
    Resources,
    Select,
    StateDirectory,
    Uses,
)

CASES = sorted((library.fixtures() / "recipes" / "problems").glob("*.yaml"))


def read(text: str, name: str = "r.yaml") -> Recipe:
    return parse.recipe(document.parse(text, name))


def problems(text: str, name: str = "r.yaml") -> list[str]:
    with pytest.raises(Invalid) as caught:
        read(text, name)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_problem_of_a_file_is_reported_where_it_is(path: Path) -> None:
    assert (
        problems(path.read_text("utf-8"), path.name)
        == path.with_suffix(".txt").read_text("utf-8").splitlines()
    )


def test_there_are_cases() -> None:
    assert len(CASES) > 20


WHOLE = """
recipe: flux-lora@12
summary: One line
doc: More
inputs:
  dataset: {type: dataset, doc: Images, only: ["*.png"]}
  base: {type: model, default: black-forest-labs/FLUX.1-dev, secret: hf_token, stream: true}
  max_steps: {type: integer, default: 1000, minimum: 1, continues: true}
  precision: {type: choice, default: "no", choices: [bf16, "no"]}
  workers: {type: integer, default: 4, key: false}
  hf_token: {type: secret, env: HF_TOKEN, required: false}
  note: {type: string, required: false}
presets:
  smoke: {dataset: "{{ fixtures }}/emoji", max_steps: 4, resources: {gpus: 0}, limits: {time: 5m}, image: busybox, env: {A: b}, python: {lock: l}}
resources: {gpus: 1, gpu_memory: 24GB, disk: 80GiB, cpus: 0.5, memory: 1GB, gpu: A100, pools: {licence: 1}}
limits: {time: 6h, cost: 5 USD}
python: {lock: trainers/diffusion.lock}
image: pytorch/pytorch
setup: [[pip, install, x], "echo y"]
health: {run: [nvidia-smi], every: 30s}
cleanup: ["rm -rf x"]
env: {A: 1}
pass_env: [HOME]
secrets: [hf_token]
code: [trainers/*.py, {git: "https://example.org/x.git", commit: 0123456789abcdef0123456789abcdef01234567, at: vendor/x}]
steps:
  latents:
    run: [python, x.py, "{{ inputs.dataset }}", [--base, "{{ inputs.base }}"]]
    outputs: {cache: latents/, log: {path: log.txt, optional: true, nonempty: true, temporary: true, sync: 5m}}
    retries: 3
  train:
    accelerate: {script: t.py, args: {rank: 3}, processes: 2}
    matrix: {lr: [1, 2], seed: "{{ inputs.seeds }}", file: {glob: "raw/*"}}
    allow_failure: true
    state: {checkpoints: {checkpoint: "step-*", every: 5m, keep: 2}, bare: {}, own: {path: out/ckpt/}}
    outputs: [a.txt, "b/"]
    metrics: true
    retries: {failure: 1}
    timeout: 1h30m
    idle_timeout: 10m
    nodes: 2
    secrets: []
    cache: false
    where: local
    resources: {gpus: 8, key: true}
    when: "{{ inputs.max_steps > 3 }}"
  best: {select: train, max: accuracy}
  next: {uses: sft@1, with: {max_steps: 3}, preset: smoke, needs: [best]}
  shell: {run: "a | b", shell: bash, metrics: {pattern: 'loss (?P<loss>[\\d.]+)'}, deps: [raw/*.txt], files: {a.json: {b: 1}}}
outputs: {lora: "{{ steps.train.a }}"}
"""


def test_a_whole_recipe_is_read() -> None:
    recipe = read(WHOLE, "recipes/flux-lora@12.yaml")
    assert (recipe.id, recipe.summary, recipe.doc) == ("flux-lora@12", "One line", "More")
    assert recipe.resources == Resources(
        0.5, 10**9, 1, "A100", 24 * 10**9, 80 * 2**30, {"licence": 1}
    )
    assert recipe.limits == Limits(21600, 5)
    assert recipe.code == (
        "trainers/*.py",
        GitCode(
            "https://example.org/x.git", "0123456789abcdef0123456789abcdef01234567", "vendor/x"
        ),
    )
    assert recipe.setup == (["pip", "install", "x"], "echo y")
    assert recipe.health and recipe.health.every == 30
    smoke = recipe.presets["smoke"]
    assert smoke.inputs == {"dataset": "{{ fixtures }}/emoji", "max_steps": 4}
    assert (
        smoke.resources == Resources(gpus=0)
        and smoke.limits == Limits(time=300)
        and smoke.image == "busybox"
    )
    assert (
        recipe.inputs["max_steps"].limits == {"minimum": 1} and recipe.inputs["max_steps"].continues
    )
    assert (
        not recipe.inputs["workers"].key
        and not recipe.inputs["note"].has_default
        and not recipe.inputs["note"].required
    )
    latents, train, best, following, shell = recipe.steps.values()
    assert latents.outputs == (
        Output("cache", "latents", directory=True),
        Output("log", "log.txt", False, True, True, True, 300),
    )
    assert (
        latents.options.retries,
        latents.options.preemptions,
        latents.secrets,
        latents.code,
    ) == (
        3,
        10,
        None,
        None,
    )
    assert (
        train.options.retries,
        train.options.preemptions,
        train.secrets,
        train.nodes,
        train.local,
        train.cache,
    ) == (1, 10, (), 2, True, False)
    assert train.outputs == (Output("a.txt", "a.txt"), Output("b/", "b", directory=True))
    assert train.state == (
        StateDirectory("checkpoints", "state/checkpoints", "step-*", 300, 2),
        StateDirectory("bare", "state/bare"),
        StateDirectory("own", "out/ckpt"),
    )
    assert (
        train.options.timeout,
        train.options.idle_timeout,
        train.metrics,
        train.resources.key,
    ) == (
        5400,
        600,
        Metrics(),
        True,
    )
    assert best.select == Select("train", "accuracy", "max")
    assert following.uses == Uses("sft@1", {"max_steps": 3}, "smoke") and following.needs == (
        "best",
    )
    assert (
        shell.shell == "bash"
        and shell.metrics == Metrics(pattern=r"loss (?P<loss>[\d.]+)")
        and shell.deps == ("raw/*.txt",)
    )


def test_a_file_and_its_recipe_have_one_name() -> None:
    text = "recipe: a@2\nsteps: {s: {run: [echo]}}"
    assert read(text, "pipeline.yaml").id == read(text, "lib/a@2.yaml").id == "a@2"
    assert problems(text, "lib/a@1.yaml") == [
        'lib/a@1.yaml:1:9: error: the recipe is named "a@2", but its file is a@1.yaml (use the same name and version in both)'
    ]


def test_problems_of_shape_and_of_meaning_are_reported_together() -> None:
    text = "recipe: a@1\nsummry: x\nsteps:\n  a: {run: [echo], needs: [bb], timeout: 3}\n  b: {run: [echo], secrets: [t]}\n"
    assert [line.split(" error: ")[0] for line in problems(text)] == [
        "r.yaml:2:1:",
        "r.yaml:4:28:",
        "r.yaml:4:42:",
        "r.yaml:5:30:",
    ]


def test_a_key_whose_value_is_wrong_is_not_missing_too() -> None:
    text = "recipe: r@1\ninputs: {a: {type: secret, env: my-token}, b: {type: choice, choices: {x: 1}}}\nsteps: {s: {run: x}}\n"
    assert len(found := problems(text)) == 2 and "must be" in found[0] and "must be" in found[1]


def test_a_secret_called_by_its_variable_is_named_by_its_input() -> None:
    [found] = problems(
        "recipe: r@1\ninputs: {key: {type: secret, env: WANDB_API_KEY}}\nsteps: {s: {run: x, secrets: [wandb_api_key]}}\n"
    )
    assert found.endswith('(use the input "key", which reads $WANDB_API_KEY)')


@pytest.mark.parametrize(
    "step", ["{cmd: x}", "{accelerte: {script: t.py}}", "{run: [x], outputs: {o: {pth: x}}}"]
)
def test_a_misspelt_key_is_not_missing_too(step: str) -> None:
    [found] = problems(f"recipe: r@1\nsteps: {{s: {step}}}\n")
    assert "has no key" in found


def test_a_step_without_a_command_says_which_there_are() -> None:
    [found] = problems("recipe: r@1\nsteps: {s: {deps: [x]}}\n")
    assert 'none of "run"' in found


def test_a_name_inside_a_template_is_underlined() -> None:
    text = 'recipe: a@1\ninputs:\n  a: {type: string, default: "x {{ inputs.bb }}"}\n  b: {type: string, default: "x"}\nsteps: {s: {run: [echo]}}'
    with pytest.raises(Invalid) as caught:
        read(text)
    [problem] = caught.value.problems
    assert (
        problem.where
        and problem.where.text[problem.where.column - 1 :][: problem.where.length] == "inputs.bb"
    )
    assert problem.fix == 'did you mean "b"?'


@given(st.lists(st.sampled_from(WHOLE.splitlines()), max_size=12), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_mangled_recipe_is_a_recipe_or_has_problems_with_places(
    lines: list[str], cut: int
) -> None:
    whole = WHOLE.splitlines()
    text = "\n".join([*whole[:cut], *lines, *whole[cut + 3 :]])
    try:
        read(text, "flux-lora@12.yaml")
    except Invalid as error:
        assert error.problems and all(
            problem.where and problem.message for problem in error.problems
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", ["{rum: 1}", "{run: x, needs: [nope]}", "{run: x, secrets: [nope], timeout: 0s}"]
)
def test_thousands_of_mistakes_end_soon(step: str) -> None:
    text = "recipe: a@1\nsteps:\n" + "".join(f"  step{n}: {step}\n" for n in range(5000))
    begun = time.process_time()
    assert 200 <= len(problems(text)) <= 401
    assert time.process_time() - begun < 4
