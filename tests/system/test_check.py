"""`recipe check`, and the same rules in `plan` and `run`: what is said, where it points, what stops, and what costs nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.errors import Invalid
from runner.execution.terms import Settings
from tests.servers.modelhub import modelhub
from tests.servers.sshd import Sshd
from tests.support import Space

RECIPE_TEXT = """\
recipe: mine@1
summary: A training by a tool that everybody knows
inputs:
  base:       {type: string, default: ./base}
  dataset:    {type: dataset, default: ./rows.jsonl}
  max_steps:  {type: integer, default: 100}
  often:      {type: integer, default: 500}
  precision:  {type: string, default: "no"}
steps:
  train:
    run:
      - ./trl
      - sft
      - [--model_name_or_path, "{{ inputs.base }}"]
      - [--dataset_name, "{{ inputs.dataset }}"]
      - [--max_steps, "{{ inputs.max_steps }}"]
      - [--save_steps, "{{ inputs.often }}"]
      - [--precision, "{{ inputs.precision }}"]
      - [--output_dir, "{{ outputs.model }}"]
    code: [trl]
    state: {checkpoints: {checkpoint: "checkpoint-*"}}
    outputs: {model: model/}
"""
NVIDIA_SMI = """\
#!/bin/sh
case "$*" in
*name,memory.total*) echo "Tesla T4, 15360" ;;
*compute_cap*) echo "7.5" ;;
*driver_version*) echo "535.161.08" ;;
'') echo "| NVIDIA-SMI 535.161.08   Driver Version: 535.161.08   CUDA Version: 12.2 |" ;;
esac
"""


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def space(tmp_path: Path) -> Space:
    space = Space(tmp_path / "space")
    space.recipe(RECIPE_TEXT)
    program(
        space.root / "trl",
        '#!/bin/sh\nfor a; do case $a in model) mkdir -p "$a"; echo x >"$a/w";; esac; done\n',
    )
    space.write("rows.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    space.write(
        "base/config.json",
        json.dumps(
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100}
        ),
    )
    return space


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def check(space: Space, *words: str, **env: str) -> tuple[int, str, str]:
    return space.command("check", *words, env=env)


def found(space: Space, *words: str, **env: str) -> dict[str, dict[str, Any]]:
    """Findings by the names of their rules."""
    _, out, err = check(space, "--format", "json", *words, **env)
    assert out, err
    return {each["code"]: each for each in json.loads(out)}


def test_a_warning_points_at_the_input_whatever_the_tool_calls_it_and_is_no_failure(
    space: Space,
) -> None:
    code, out, _ = check(space)
    assert code == 0
    assert (
        "recipe.yaml:7:3: warning: 100 steps with a checkpoint every 500: an interrupted training would have no checkpoint to resume from"
        in out
    )
    assert (
        "    often:      {type: integer" in out
        and "fix: set `save_every` to at most a quarter of `max_steps`" in out
    )
    assert check(space, "--strict")[0] == 3
    assert check(space, "often=10", "--strict")[0] == 0
    assert check(space, "--allow", "checkpoints-too-rare", "--strict")[0] == 0


def test_fix_says_what_to_type_and_what_is_left_then(space: Space) -> None:
    code, out, _ = check(space, "--fix", "--strict")
    assert code == 0
    assert (
        "type: recipe run ./recipe.yaml often=25\nwith these changes, no problems remain\n" in out
    )
    out = check(
        space, "--fix", "--driver", "loopback", "--allow", "resume-true", "--python", "current"
    )[1]
    assert (
        "type: recipe run ./recipe.yaml --python current --driver loopback --allow resume-true often=25\n"
        in out
    )
    before = space.read("recipe.yaml")
    space.write(
        "recipe.yaml",
        before.replace(
            '[--save_steps, "{{ inputs.often }}"]', "[--save_steps, 500]\n      - --save_only_model"
        ),
    )
    code, out, _ = check(space, "--fix")
    assert code == 3
    assert "write: in the command of step train: --save_steps 25\n" in out
    assert "write: in the command of step train: --save_only_model false\n" in out
    assert not (space.root / ".recipe" / "runs").exists() and space.read("recipe.yaml") != before


@pytest.mark.parametrize(
    ("step", "place"),
    [
        ("run: [./trl, sft, --lr, 0.1, --save_only_model]", "recipe.yaml:5:34"),
        ("run: [./trl, sft, [--lr, 0.1, [--save_only_model=true]]]", "recipe.yaml:5:36"),
        ("run: |\n      echo\n      ./trl sft \\\n        --save_only_model", "recipe.yaml:8:9"),
        ("accelerate: {script: t.py, args: {lr: 1, save_only_model: true}}", "recipe.yaml:5:46"),
        (
            "run: [axolotl, train, a.yml]\n    files: {a.yml: {lr: 1, save-only-model: true}}",
            "recipe.yaml:6:28",
        ),
        ("run: [axolotl, train, here.yml]\n    deps: [here.yml]", "here.yml:2:1"),
        ("run: [axolotl, train, here.toml]\n    deps: [here.toml]", "here.toml:3:2"),
        ('run: [./trl, sft, \'{{ "--save_only" ~ "_model" }}\']', "recipe.yaml:4:3"),
    ],
)
def test_a_finding_points_at_what_says_it_in_the_recipe_or_in_a_file(
    space: Space, step: str, place: str
) -> None:
    space.write("t.py", "")
    space.write("here.yml", "lr: 1\nsave_only_model: true\n")
    space.write("here.toml", "lr = 1\n[x]\n save-only-model = true\n")
    tail = "    code: [trl, t.py]\n    state: {checkpoints: {checkpoint: 'checkpoint-*'}}\n    outputs: {o: o.txt}\n"
    space.recipe(f"recipe: a@1\nsummary: x\nsteps:\n  train:\n    {step}\n{tail}")
    finding = found(space)["save-only-model"]
    assert f"{finding['path']}:{finding['line']}:{finding['column']}".endswith(place), finding


def test_fix_speaks_as_the_file_does_that_says_it(space: Space) -> None:
    space.write(
        "a.yml",
        "load_in_4bit: true\nbf16: true\nfsdp: [full_shard]\nflash_attention: true\nsave_steps: 9\nmax_steps: 9\n",
    )
    space.recipe(
        "recipe: ax@1\nsummary: x\nresources: {gpus: 1, gpu: T4}\nsteps:\n  train:\n    run: [axolotl, train, a.yml]\n    deps: [a.yml]\n"
        "    state: {checkpoints: {checkpoint: 'checkpoint-*'}}\n    outputs: {o: o.txt}\n"
    )
    written = [
        line
        for line in check(space, "--fix")[1].splitlines()
        if line.startswith("write: in a.yml: ")
    ]
    said = {line.removeprefix("write: in a.yml: ") for line in written}
    assert said == {
        "bf16: false",
        "fp16: true",
        "flash_attention: false",
        'bnb_4bit_quant_storage: "bfloat16"',
        "save_steps: 2",
    }


def test_an_unknown_rule_cannot_be_allowed(space: Space) -> None:
    code, _, err = check(space, "--allow", "checkpoints-too-rar")
    assert (
        code == 3
        and 'there is no rule "checkpoints-too-rar"' in err
        and 'did you mean "checkpoints-too-rare"?' in err
    )


def test_findings_are_for_programs_too(space: Space) -> None:
    assert check(space, "--format", "github")[1].startswith("::warning file=")
    sarif = json.loads(check(space, "--format", "sarif")[1])
    assert [each["ruleId"] for each in sarif["runs"][0]["results"]] == ["checkpoints-too-rare"]
    assert found(space, "often=10") == {}


def test_what_could_not_be_asked_is_listed_with_what_it_needs(space: Space) -> None:
    code, out, _ = check(space, "-v", "base=nobody/has-this", "often=10")
    assert code == 0
    assert "not checked: model-missing: needs the model's files, locally or on the Hub\n" in out
    assert "not checked: vast" not in out, "what runs here is not rented"
    assert "not checked: model-missing" not in check(space, "-v", "often=10")[1]


def test_the_verdict_is_no_all_clear_where_rules_could_not_be_judged(space: Space) -> None:
    code, out, _ = check(space, "base=nobody/has-this", "often=10")
    verdict, needs = out.splitlines()
    count = int(
        verdict.removeprefix("mine@1: no problems found, ").removesuffix(" rules not checked")
    )
    assert (
        code == 0
        and count >= 5
        and needs.startswith("to check them, provide: the model's files, locally or on the Hub (")
    )
    assert f"1 warning, {count} not checked\n" in check(space, "base=nobody/has-this")[1]
    code, out, err = check(space, "base=nobody/has-this", "often=10", "--format", "json")
    assert (code, out) == (0, "[]\n") and f"{count} rules were not checked" in err


def test_plan_shows_findings_below_its_steps_and_run_does_not_start_on_an_error(
    space: Space,
) -> None:
    space.write(
        "recipe.yaml",
        RECIPE_TEXT.replace("- [--output_dir", "- --save_only_model\n      - [--output_dir"),
    )
    code, out, _ = space.command("plan", "./recipe.yaml", "often=10")
    assert code == 0
    assert (
        out.index("mine@1: 1 to run")
        < out.index("error: save_only_model leaves the optimizer")
        < out.index("--allow save-only-model")
    )
    plan = json.loads(space.command("plan", "./recipe.yaml", "often=10", "--json")[1])
    assert [each["code"] for each in plan["findings"]] == ["save-only-model"]
    code, _, err = space.command("run", "./recipe.yaml", "often=10")
    assert code == 3 and "error: save_only_model leaves the optimizer" in err
    assert not (space.root / "model" / "w").exists() and "save" not in space.command("runs")[1]
    assert space.command("run", "./recipe.yaml", "often=10", "--allow", "save-only-model")[0] == 0
    assert (space.root / "model" / "w").exists()


def test_a_warning_is_said_by_a_run_and_stops_nothing(space: Space) -> None:
    code, _, err = space.command("run")
    assert code == 0 and "warning: checkpoints-too-rare: 100 steps" in err
    assert "warning" not in space.command("run")[2], "a run that does nothing asks nothing"


def test_the_library_refuses_and_allows_as_the_command_line_does(space: Space) -> None:
    with pytest.raises(Invalid) as caught:
        space.run({"base": "./nowhere"})
    assert [problem.code for problem in caught.value.problems] == ["model-missing"]
    assert space.run({"base": "./nowhere"}, settings=Settings(allow=("model-missing",))) == [
        "train"
    ]


@pytest.mark.parametrize("words", [("run", "./plain.yaml"), ("plan", "./recipe.yaml")])
def test_where_nothing_trains_or_nothing_is_to_be_done_no_rule_is_read(
    space: Space, words: tuple[str, ...]
) -> None:
    space.write(
        "plain.yaml",
        "recipe: plain@1\nsummary: x\nsteps: {a: {run: 'echo > {{ outputs.o }}', outputs: {o: o.txt}}}\n",
    )
    if "./recipe.yaml" in words:
        space.run()
    code = "import sys\nfrom runner.interface.cli.main import main\nmain(sys.argv[1:])\nprint('jinja2' in sys.modules, 'runner.advice.tool_settings' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=space.root,
        capture_output=True,
        text=True,
        check=True,
    )
    opened = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\nsys.addaudithook(lambda e, a: e == 'open' and str(a[0]).endswith('gotchas.yaml') and print('READ'))\n"
            + code,
            *words,
        ],
        cwd=space.root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "READ" not in opened.stdout and done.stdout.splitlines()[-1].startswith("False")


def test_rules_beside_a_recipe_are_asked_also_where_nothing_trains(space: Space) -> None:
    space.write(
        "plain.yaml",
        "recipe: plain@1\nsummary: x\ninputs: {day: {type: string, default: monday}}\nsteps: {a: {run: [touch, '{{ outputs.o }}'], env: {DAY: '{{ inputs.day }}'}, outputs: {o: o.txt}}}\n",
    )
    rule = {
        "id": "no-mondays",
        "severity": "error",
        "title": "A run on a Monday",
        "about": "step",
        "when": "{{ settings.day == 'monday' }}",
    }
    rule |= {
        "message": "it is {{ settings.day }}",
        "remedy": "wait",
        "evidence": ["everybody"],
        "fix": {"settings": {"day": "tuesday"}},
    }
    space.write("gotchas.yaml", json.dumps({"rules": [rule]}))
    code, out, _ = check(space, "./plain.yaml", "--fix")
    assert (
        code == 0
        and "error: it is monday" in out
        and "type: recipe run ./plain.yaml day=tuesday" in out
    )
    assert space.command("run", "./plain.yaml")[0] == 3
    space.write("gotchas.yaml", json.dumps({"rules": [rule | {"when": "{{ setings.day }}"}]}))
    code, _, err = space.command("run", "./plain.yaml")
    assert code == 3 and "gotchas.yaml:1:" in err and "there is no `setings`" in err


def test_what_a_used_recipe_is_given_is_put_right_where_it_is_given(space: Space) -> None:
    space.recipe(RECIPE_TEXT, name="inner.yaml")
    space.recipe(
        "recipe: outer@1\nsummary: x\ninputs: {often: {type: integer, default: 1}}\nsteps:\n  inside:\n    uses: ./inner.yaml\n    with: {often: 700}\n"
    )
    code, out, _ = check(space, "--fix")
    assert code == 0 and "recipe.yaml:5:3: warning: 100 steps with a checkpoint every 700" in out
    assert "write: in step inside: with: {often: 25}\n" in out and "type:" not in out


def test_the_instances_of_a_matrix_are_reported_once(space: Space) -> None:
    space.recipe(
        RECIPE_TEXT.replace("    state:", "    matrix: {seed: [1, 2, 3]}\n    state:").replace(
            "model/}", "'{{ matrix.seed }}/model/'}"
        )
    )
    assert check(space)[1].count("100 steps") == 1


# -- the facts ---------------------------------------------------------------------------------------------------------------------------------------


def test_this_machines_gpu_is_asked_for_what_it_can(space: Space, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    finding = found(space, "precision=bf16", "often=10", PATH=path)["bf16-before-ampere"]
    assert (
        finding["severity"] == "error"
        and "Tesla T4 (compute capability 7.5) does not support bf16" in finding["message"]
    )
    assert "precision=fp16" in check(space, "precision=bf16", "often=10", "--fix", PATH=path)[1]
    assert found(space, "precision=bf16", "often=10") == {}, "no GPU here: not checked"


def test_a_card_of_ones_own_is_known_by_what_its_file_says(space: Space, tmp_path: Path) -> None:
    space.write(
        "recipe.yaml",
        RECIPE_TEXT.replace(
            "    state:", "    resources: {gpus: 1, gpu: ACME Trainer}\n    state:"
        ),
    )
    assert found(space, "precision=bf16", "often=10") == {}, "not checked: nobody knows that card"
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "hardware.yaml").write_text(
        "gpus:\n  acme: {memory: 24, capability: 7.5, tflops: 65, names: [ACME Trainer]}\n"
    )
    config = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert (
        "ACME Trainer (compute capability 7.5) does not support bf16"
        in found(space, "precision=bf16", "often=10", **config)["bf16-before-ampere"]["message"]
    )
    (tmp_path / "recipe" / "hardware.yaml").write_text(
        "gpus:\n  acme: {memory: 24, capabillity: 7.5, tflops: 65}\n"
    )
    code, _, err = check(space, "precision=bf16", "often=10", **config)
    assert (
        code == 3
        and "recipe/hardware.yaml:2:" in err
        and 'gpus.acme has no key "capabillity"' in err
    )


def test_a_host_elsewhere_is_asked_when_it_is_named(space: Space, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    program(tools / "nvidia-smi", NVIDIA_SMI)
    with Sshd(tmp_path / "sshd", options=[f"SetEnv PATH={tools}:/usr/bin:/bin"]) as server:
        table = {"known_hosts": str(server.known_hosts), "identity": str(server.identity)}
        space.write(
            "recipe.toml",
            "[drivers.ssh]\n"
            + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()),
        )
        assert "bf16-before-ampere" in found(
            space, "precision=bf16", "often=10", "--host", server.address
        )
        code, out, err = check(
            space, "precision=bf16", "often=10", "--host", "nobody@127.0.0.1:1", "-v"
        )
        assert (
            code == 0
            and "cannot get facts from the host" in err
            and "not checked: bf16-before-ampere" in out
        )
        assert list(server.home.iterdir()) == []


def test_a_model_too_large_for_its_gpu_is_refused_with_the_terms(
    space: Space, tmp_path: Path
) -> None:
    shape = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    space.write(
        "base/config.json", json.dumps(shape | {"intermediate_size": 28672, "vocab_size": 128256})
    )
    space.write("train.py", "")
    space.recipe(
        "recipe: big@1\nsummary: x\ninputs:\n  base: {type: model, default: ./base}\n  max_length: {type: integer, default: 1024}\n"
        "  rank: {type: integer, default: 16}\n  micro_batch: {type: integer, default: 1}\nresources: {gpus: 1, gpu_memory: 24GB}\n"
        "steps:\n  train:\n    accelerate: {script: train.py, args: {base: '{{ inputs.base }}', rank: '{{ inputs.rank }}'}}\n    code: [train.py]\n"
        "    state: {checkpoints: {checkpoint: 'step-*'}}\n    outputs: {o: o.txt}\n"
    )
    finding = found(space)["memory-no"]
    assert (
        finding["severity"] == "error"
        and "GB of GPU memory, and 2" in finding["message"]
        and "weights" in finding["message"]
    )
    program(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    there = found(space, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")["memory-no"]
    assert "GB of GPU memory, and 1" in there["message"], (
        "the card that is there counts, not the one that was asked for"
    )
    space.write("base/config.json", "{}")
    code, out, _ = check(space, "-v")
    assert (
        code == 0
        and "not checked: memory-no: needs the memory estimate: cannot count the weights of the model family"
        in out
    )
    assert "not checked: memory-tight: needs the memory estimate: cannot count the weights" in out


@pytest.mark.parametrize(
    "command",
    [
        "uv, run, prime-rl, '@', rl.toml",
        "uv, run, rl, '@', rl.toml",
        "rl, '@', rl.toml",
        "uv, run, --project, /opt/x, --no-sync, rl, '@', rl.toml, --max-steps, '500'",
    ],
)
def test_a_configuration_file_is_read_as_the_tool_would(space: Space, command: str) -> None:
    space.recipe(
        f"recipe: rl@1\nsummary: x\nsteps:\n  learn:\n    run: [{command}]\n"
        "    deps: [rl.toml]\n    outputs: {o: o.txt}\n"
    )
    space.write(
        "rl.toml",
        "seq_len = 4096\n[trainer.model]\nseq_len = 2048\n[orchestrator.train.sampling]\ntop_p = 0.9\n[ckpt]\ninterval = 5\n[wandb]\n",
    )
    rules = found(space)
    assert set(rules) == {"prime-rl-seq-len", "forbidden-sampling", "prime-rl-unknown-section"}
    assert 'no section "wandb"' in rules["prime-rl-unknown-section"]["message"]
    space.write("recipe.yaml", space.read("recipe.yaml").replace("deps: [rl.toml]", "env: {A: b}"))
    assert set(found(space)) == {"no-checkpoints"}, (
        "a file that the step does not get is not its configuration"
    )
    space.write("recipe.yaml", space.read("recipe.yaml").replace("env: {A: b}", "deps: ['*.toml']"))
    space.write(
        "rl.toml",
        "[ckpt]\ninterval = 5\n[trainer.modell]\nx = 1\n[orchestrator]\nbatch_size = 'many'\n",
    )
    rules = found(space)
    assert "batch_size must be a whole number" in rules["prime-rl-mistyped"]["message"]
    assert "trainer.modell: did you mean model?" in rules["prime-rl-slip"]["message"]
    space.write("rl.toml", "seq_len = \n")
    assert "rl.toml: Invalid value" in found(space)["config-unreadable"]["message"]


def test_code_is_read_for_what_it_imports_and_passes(space: Space) -> None:
    space.write(
        "train.py",
        "from trl import PPOTrainer\nfrom transformers import TrainingArguments\nTrainingArguments(warmup_ratio=0.1)\n",
    )
    space.write(
        "lock.txt", "trl==1.16.0 --hash=sha256:00\ntransformers==5.23.0 \\\n    --hash=sha256:00\n"
    )
    space.recipe(
        "recipe: code@1\nsummary: x\npython: {lock: lock.txt}\nsteps:\n  train:\n    run: [python, train.py]\n    code: [train.py]\n    outputs: {o: o.txt}\n"
    )
    rules = found(space)
    assert (
        "trl 1.16.0 has no trl.PPOTrainer" in rules["removed-trainers"]["message"]
        and "rlhf@1" in rules["removed-trainers"]["fix"]
    )
    assert (
        "transformers 5.23.0 has no argument warmup_ratio" in rules["removed-arguments"]["message"]
    )
    space.write("lock.txt", "trl==0.11.0 --hash=sha256:00\ntransformers==4.46.0 --hash=sha256:00\n")
    assert found(space) == {}


def test_what_an_earlier_run_left_is_known(space: Space) -> None:
    body = RECIPE_TEXT.replace(
        "{type: integer, default: 100}", "{type: integer, default: 100, continues: true}"
    )
    space.recipe(
        body.replace("- [--output_dir", "- [--lr_scheduler_type, cosine]\n      - [--output_dir")
    )
    program(
        space.root / "trl",
        "#!/bin/sh\nmkdir -p state/checkpoints/checkpoint-50 state/checkpoints/checkpoint-60\necho x >state/checkpoints/checkpoint-50/a.txt\n"
        "echo xet-core error >&2\nexit 1\n",
    )
    assert space.command("run", "./recipe.yaml", "often=10")[0] == 1
    rules = found(space, "often=10", "max_steps=200")
    assert "which was 100 and is now 200" in rules["schedule-changed"]["message"]
    assert rules["xet-download"]["severity"] == "note"
    assert "schedule-changed" not in found(space, "often=10")


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with modelhub() as address:
        yield address


@pytest.mark.usefixtures("room")
def test_the_hub_is_asked_whether_there_is_such_a_model_and_who_may_read_it(
    space: Space, hub: str, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    env = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "",
    }
    assert (
        "there is no model at gone/model"
        in found(space, "base=gone/model", "often=10", **env)["model-missing"]["message"]
    )
    assert (
        "without a token"
        in found(space, "base=gated/model", "often=10", **env)["gated-without-token"]["message"]
    )
    assert (
        "its account has no access to the model"
        in found(space, "base=gated/model", "often=10", **env | {"HF_TOKEN": "hf_x"})[
            "gated-not-accepted"
        ]["message"]
    )
    assert found(space, "base=open/model", "often=10", **env) == {}


def test_a_hub_that_cannot_be_reached_leaves_its_rules_unchecked(
    space: Space, tmp_path: Path
) -> None:
    env = {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    code, out, _ = check(space, "base=open/model", "often=10", "-v", **env)
    assert code == 0 and "not checked: model-missing" in out


def test_what_the_hubs_cache_has_is_known_without_the_hub(space: Space, tmp_path: Path) -> None:
    snapshot = (
        tmp_path / "hf" / "hub" / "models--black-forest-labs--FLUX.1-dev" / "snapshots" / "abc"
    )
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}'
    )
    space.write("train.py", "from transformers import AutoModelForCausalLM\n")
    space.recipe(
        RECIPE_TEXT.replace("./trl\n      - sft", "python\n      - train.py").replace(
            "code: [trl]", "code: [train.py]"
        )
    )
    rules = found(
        space, "base=black-forest-labs/FLUX.1-dev", "often=10", HF_HOME=str(tmp_path / "hf")
    )
    assert "is a vision-language model" in rules["model-not-text-only"]["message"]


BY_NAME = """\
recipe: m@1
inputs: {{{inputs}}}
steps:
  train:
    run: [sh, -c, 'echo "$0 $1" > "$2"', {words}, "{{{{ outputs.o }}}}"]
    state: {{ck: {{every: 5m}}}}
    outputs: {{o: x.txt}}
"""
WORDS = '"{{ inputs.NAME }}", x'


def test_a_choice_is_no_model_whatever_it_is_called_and_given_as(tmp_path: Path) -> None:
    space = Space(tmp_path / "space")
    names = ["model", "base", "model_name", "base_model", "pretrained_model_name_or_path"]
    choice = "{type: choice, choices: [resnet50, vit_b16], default: resnet50}"
    given = ["{{ inputs.NAME }}", "--NAME={{ inputs.NAME }}", "NAME={{ inputs.NAME }}"]
    words = [text.replace("NAME", name) for name in names for text in given]
    words += ["--model", "{{ inputs.model }}"]
    space.recipe(
        BY_NAME.format(
            inputs=", ".join(f"{name}: {choice}" for name in names),
            words=", ".join(map(json.dumps, words)),
        ).replace("$2", "$(eval echo \\${$#})")
    )
    assert found(space) == {}


@pytest.mark.parametrize(
    ("value", "words"), [("yolov8n.pt", WORDS), ("./nowhere", '--NAME, "{{ inputs.NAME }}"')]
)
def test_a_text_that_is_called_a_model_gives_a_note_and_the_run_starts(
    tmp_path: Path, value: str, words: str
) -> None:
    space = Space(tmp_path / "space")
    text = f"model_name: {{type: string, default: {value}}}"
    space.recipe(BY_NAME.format(inputs=text, words=words.replace("NAME", "model_name")))
    [note] = found(space).values()
    assert (note["code"], note["severity"]) == ("model-missing", "note")
    code, _, err = space.command("run", "--allow", "model-missing")
    assert code == 0 and "error" not in err
    code, _, err = space.command("run", "--force")
    assert code == 0 and "error" not in err


def test_an_option_that_nobody_knows_is_no_model_either(tmp_path: Path) -> None:
    space = Space(tmp_path / "space")
    space.recipe(BY_NAME.format(inputs="", words="--model, resnet50, --out"))
    assert {each["severity"] for each in found(space).values()} == {"note"}


def test_an_input_of_type_model_is_one(tmp_path: Path) -> None:
    space = Space(tmp_path / "space")
    inputs = "model: {type: model, default: ./nowhere}"
    space.recipe(BY_NAME.format(inputs=inputs, words=WORDS.replace("NAME", "model")))
    assert found(space)["model-missing"]["severity"] == "error"


def test_a_declared_model_is_asked_for_before_one_that_is_only_called_so(space: Space) -> None:
    space.write(
        "recipe.yaml",
        RECIPE_TEXT.replace(
            "inputs:\n", "inputs:\n  model: {type: choice, choices: [small], default: small}\n"
        ),
    )
    assert "model-missing" not in found(space)
    space.write(
        "recipe.yaml",
        RECIPE_TEXT.replace(
            "base:       {type: string",
            "base: {type: choice, choices: [a], default: a}\n  hub: {type: string",
        ).replace("inputs.base", "inputs.hub"),
    )
    assert "model-missing" not in found(space)
    assert found(space, "hub=./nowhere")["model-missing"]["severity"] == "error"
