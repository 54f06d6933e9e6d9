"""Promise: every example validates and plans, and those that two processors can run do what their comments say, once."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import runner
from runner.errors import CannotRun
from runner.execution.terms import Settings
from runner.storage import sources
from runner.survey.validation import check_bytes
from tests.support import Space
from tests.tools import needs

EXAMPLES = Path(__file__).parent.parent / "examples"
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
RECIPES = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.glob("*/*.yaml"))
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# What an example cannot know by itself, and the recipes that only others use.
GIVEN = {
    "01-flux-lora/recipe.yaml": {"images": "./images"},
    "05-pretrain/recipe.yaml": {"text": "./text"},
    "06-wrapped-trainer/recipe.yaml": {"images": "."},
    "11-trl-script/recipe.yaml": {"base": "./base", "rows": "./rows"},
    "03-rlhf/sft.yaml": {"base": "./base.json", "demos": "./demos.jsonl"},
    "03-rlhf/reward.yaml": {"preferences": "./preferences.jsonl"},
    "03-rlhf/rlhf.yaml": {"policy": "./base.json", "reward": "./base.json", "strength": 1},
    "03-rlhf/eval.yaml": {"before": "./base.json", "after": "./base.json", "reward": "./base.json"},
}

EITHER_OR = ("extract", "backward", "augmented")
"""Steps that are skipped by default."""

Example = Callable[[str], Space]


@pytest.fixture
def example(tmp_path: Path) -> Example:
    """A copy of an example, to run in."""

    def copied(name: str) -> Space:
        shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns(".recipe"))
        return Space(tmp_path / name)

    return copied


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub and no bucket answers."""

    def silence(address: str) -> str:
        raise ConnectionError(address)

    monkeypatch.setattr(sources, "_ask_hub", silence)
    monkeypatch.setattr(sources, "_ask_store", silence)


def runs_once(space: Space, inputs: dict[str, object] | None = None, **more: object) -> list[str]:
    """Run, and again: the second time there is nothing to do."""
    ran = space.run(inputs, **more)
    assert space.run(inputs, **more) == []
    return ran


# -- all -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES)
def test_every_example_is_valid_without_a_warning(path: str) -> None:
    assert (
        check_bytes(
            (EXAMPLES / path).read_bytes(), str(EXAMPLES / path), (EXAMPLES / path).parent, {}
        )
        == []
    )


@pytest.mark.parametrize("path", RECIPES)
def test_every_example_plans(path: str, example: Example, offline: None) -> None:
    folder, _, name = path.partition("/")
    space = example(folder)
    space.file = name
    answers = space.answers(GIVEN.get(path))
    assert answers and {
        step for step, answer in answers.items() if answer not in ("run", "maybe")
    } <= {"sft/publish", *EITHER_OR}


@pytest.mark.parametrize("path", RECIPES)
def test_every_preset_of_an_example_plans(path: str, example: Example, offline: None) -> None:
    folder, _, name = path.partition("/")
    space = example(folder)
    space.file = name
    for preset in runner.load(f"./{name}", workspace=space.root).presets:
        assert space.answers(GIVEN.get(path), preset=preset)


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w/.-]+)\)", table))
    assert all((EXAMPLES / path).exists() for path in linked)
    assert {path.partition("/")[0] for path in linked} == set(FOLDERS)


# -- 1 a Flux LoRA ---------------------------------------------------------------------------------------------------------------------------------


def test_captions_are_checked_where_there_is_no_gpu(example: Example) -> None:
    space = example("01-flux-lora")
    space.file = "captions.yaml"
    assert runs_once(space) == ["pair"]
    rows = [json.loads(line) for line in space.read("captioned/metadata.jsonl").splitlines()]
    assert [row["file_name"] for row in rows] == ["blue.png", "green.png", "red.png"]

    (space.root / "images/red.txt").unlink()
    space.attempt()
    assert space.summary is not None and "red.png: no caption" in str(space.summary.failed[0].tail)


def test_a_training_that_wants_a_gpu_says_so_before_anything_starts(
    example: Example, offline: None
) -> None:
    space = example("01-flux-lora")
    code, _, err = space.command("run", "images=./images", env={"HF_HUB_OFFLINE": "1"})
    assert code == 2 and "train requires 1 GPU" in err
    assert not (space.root / "images/captioned").exists()


# -- 2 a sweep -------------------------------------------------------------------------------------------------------------------------------------


def test_a_sweep_exports_its_best(example: Example) -> None:
    space = example("02-sweep")
    ran = runs_once(space)
    assert len(ran) == 6 + 2
    with (space.root / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert space.summary is not None and dict(space.summary.results).keys() == {
        "formula",
        "model",
        "table",
    }
    weights = json.loads(space.read("best/model.json"))
    assert space.read("formula.txt").startswith(f"y = {weights['a']:.3f} x^2")
    assert (
        abs(weights["a"] - 1.5) < 0.3 and abs(weights["b"] + 0.7) < 0.2
    )  # the curve that the points were made from

    space.write("best/model.json", "{}")
    assert space.plan().conflicts == ["best/model.json"]


def test_another_seed_trains_nothing_else(example: Example) -> None:
    space = example("02-sweep")
    space.run({"rates": [0.03], "seeds": [1, 2]})
    assert space.run({"rates": [0.03], "seeds": [1, 2, 3]})[0] == "train[lr=0.03,seed=3]"
    assert [
        event.id
        for event in space.events
        if event.after == "RUNNING" and event.id.startswith("train")
    ] == ["train[lr=0.03,seed=3]"]


def test_a_rate_that_diverges_is_left_out(example: Example) -> None:
    space = example("02-sweep")
    space.run({"rates": [0.03, 3], "seeds": [1]})
    with (space.root / "sweep.csv").open(newline="") as file:
        assert [row["lr"] for row in csv.DictReader(file)] == ["0.03"]


# -- 3 recipes of recipes --------------------------------------------------------------------------------------------------------------------------


def test_four_recipes_are_one(example: Example) -> None:
    space = example("03-rlhf")
    assert set(runs_once(space)) == {"sft/train", "reward/train", "rlhf/train", "eval/compare"}
    report = json.loads(space.read("eval/report.json"))
    assert report["reward_after"] > report["reward_before"] + 0.5
    assert 0 < report["divergence"] < 3


def test_a_preset_reaches_the_inner_recipes(example: Example) -> None:
    space = example("03-rlhf")
    full, small = space.plan().plan, space.plan(preset="smoke").plan
    read = [
        [spec.names.inputs.get("epochs") for spec in plan.specs()[:2]] for plan in (full, small)
    ]
    assert read == [[200, 200], [20, 20]]


def test_a_secret_is_handed_on_and_stored_nowhere(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a_token_of_somebody")
    space = example("03-rlhf")
    space.run()
    for path in space.root.rglob("*"):
        assert not path.is_file() or b"hf_a_token_of_somebody" not in path.read_bytes(), path


# -- 4 files ---------------------------------------------------------------------------------------------------------------------------------------


def test_of_a_thousand_files_only_the_new_one_is_converted(example: Example) -> None:
    space = example("04-files")
    for n in range(997):
        space.write(f"raw/{n:03}.txt", f"text {'number ' * (n % 5)} of {n}\n")
    assert len(space.run(settings=Settings(jobs=2))) == 1001
    assert space.run() == []

    (space.root / "raw/500.txt").unlink()
    space.write("raw/new.txt", "a brand new text\n")
    assert space.run() == ["convert[file=raw%2Fnew.txt]", "merge"]
    total = dict(line.split("\t") for line in space.read("total.tsv").splitlines())
    assert total["brand"] == "1" and int(total["text"]) == 997


def test_parts_are_known_when_they_are_made(example: Example) -> None:
    space = example("04-files")
    space.file = "split.yaml"
    ran = runs_once(space)
    assert ran[0] == "split" and ran[-1] == "merge" and len(ran) == 2 + 5
    assert space.read("split-total.tsv").splitlines()[0] == "and\t12"

    with (space.root / "large.txt").open("a") as file:
        file.write("one more line\n")
    assert space.run() == ["split", "convert[part=parts%2Fpart-0004.txt]", "merge"]


def test_a_step_may_take_a_part_and_the_whole(space: Space) -> None:
    space.recipe("""
steps:
  split: {run: "echo 1 > parts/1.txt; echo 2 > parts/2.txt", outputs: {parts: parts/}}
  share:
    matrix: {part: {glob: "parts/*.txt"}}
    run: cat "{{ matrix.part }}" "{{ steps.split.parts }}"/* > "{{ outputs.all }}"
    outputs: {all: "share/{{ matrix.part | stem }}.txt"}
""")
    assert runs_once(space) == ["split", "share[part=parts%2F1.txt]", "share[part=parts%2F2.txt]"]
    assert space.read("share/2.txt") == "2\n1\n2\n"


# -- 5 several machines ----------------------------------------------------------------------------------------------------------------------------


def test_a_plan_for_four_nodes_is_refused_by_one(example: Example) -> None:
    space = example("05-pretrain")
    code, _, err = space.command("run", "text=./text")
    assert code == 2 and "train requires 4 nodes, but the driver local has one" in err


def test_the_number_of_nodes_is_no_reason_to_train_again(example: Example) -> None:
    space = example("05-pretrain")
    authors = [
        [node.author for node in space.plan({"text": "./text", "machines": n}).plan.nodes]
        for n in (1, 8)
    ]
    assert authors[0] == authors[1]


# -- 6 somebody else's trainer ---------------------------------------------------------------------------------------------------------------------

TRAINER = """
import json, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))["config"]
process = config["process"][0]
folder = pathlib.Path(process["training_folder"], config["name"])
for step in range(process["train"]["steps"]):
    print(f"step {step} loss: {1 / (step + 1):.3f}")
(folder / "lora.safetensors").write_text(json.dumps(process))
"""


def git(folder: Path, *words: str) -> str:
    words = ("-c", "user.name=t", "-c", "user.email=t@example.org", *words)
    return subprocess.run(
        [needs("git"), "-C", str(folder), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_trainer_at_a_commit_gets_its_configuration(example: Example, tmp_path: Path) -> None:
    trainer = tmp_path / "trainer"
    trainer.mkdir()
    git(trainer, "init", "--quiet")
    (trainer / "run.py").write_text(TRAINER)
    git(trainer, "add", "run.py")
    git(trainer, "commit", "--quiet", "-m", "A trainer")
    commit = git(trainer, "rev-parse", "HEAD")
    (trainer / "run.py").write_text("raise SystemExit('a later commit')")
    git(trainer, "commit", "--quiet", "-am", "A later one")

    space = example("06-wrapped-trainer")
    text = re.sub(
        r'git: "[^"]+", commit: \w+',
        f'git: "file://{trainer}", commit: {commit}',
        space.read("recipe.yaml"),
    )
    text = re.sub(r"(?m)^    (image|resources): .*\n", "", text).replace(
        "adamw8bit", "adamw"
    )  # what this machine has not
    space.write("recipe.yaml", text)
    space.write("base/config.json", "{}")
    space.write("pictures/one.txt", "a picture")
    prompt = 'it\'s "dusk": $5, `x` # {y}'
    inputs = {"images": "./pictures", "base": "./base", "max_steps": 3, "prompts": [prompt]}
    assert runs_once(space, inputs) == ["train"]
    told = json.loads(space.read("out/lora/lora.safetensors"))
    assert told["sample"]["prompts"] == [prompt]
    assert (
        told["train"]["steps"] == 3 and told["train"]["lr"] == 1e-4 and told["trigger_word"] is None
    )
    assert told["datasets"][0]["resolution"] == [512, 768, 1024]


# -- 7 an evaluation -------------------------------------------------------------------------------------------------------------------------------


def test_an_evaluation_ends_in_a_report(example: Example) -> None:
    space = example("07-evaluation")
    assert runs_once(space) == ["predict", "score", "report"]
    assert space.read("report.md").startswith("# Passed: 80.0% of 5 right")
    assert space.run({"needed": 0.9}) == ["report"]
    assert space.read("report.md").startswith("# Not passed")


def test_a_file_that_is_not_wanted_changes_nothing(example: Example) -> None:
    space = example("07-evaluation")
    space.run()
    space.write("questions/notes.txt", "other notes")
    assert space.run() == []
    space.write("questions/more/late.jsonl", '{"text": "broken too", "label": "bad"}\n')
    assert space.run() == ["predict", "score", "report"]
    assert "of 6 right" in space.read("report.md")
    (space.root / "questions/reviews.jsonl").unlink()
    shutil.rmtree(space.root / "questions/more")
    with pytest.raises(CannotRun, match="contains no"):
        space.attempt()


def test_a_step_sees_of_a_dataset_only_what_is_wanted(space: Space) -> None:
    space.recipe("""
inputs: {data: {type: dataset, only: ["*.txt"]}}
steps: {look: {run: 'ls "{{ inputs.data }}" > "{{ outputs.names }}"', outputs: {names: names.txt}}}
""")
    space.write("data/a.txt", "a")
    space.write("data/b.png", "b")
    space.run({"data": "./data"})
    assert space.read("names.txt") == "a.txt\n"


# -- 8 the Hub and a bucket ------------------------------------------------------------------------------------------------------------------------


def test_what_no_server_answers_for_is_not_resolved_yet(example: Example, offline: None) -> None:
    space = example("08-hub-and-bucket")
    survey = space.plan()
    assert (
        "s3://example-support/chats/ is not resolved yet"
        in survey.verdicts[survey.plan.index["clean"]].reasons
    )
    assert not (space.root / "recipe.lock").exists()


def test_a_lock_is_honoured_without_a_network(example: Example, offline: None) -> None:
    space = example("08-hub-and-bucket")
    lock = {
        "hf://Qwen/Qwen2.5-0.5B@main": f"hf:{COMMIT}",
        "s3://example-support/chats/": "etag:one",
    }
    space.write("recipe.lock", json.dumps(lock))
    key = space.key("clean")
    space.write("recipe.lock", json.dumps({**lock, "s3://example-support/chats/": "etag:two"}))
    assert space.key("clean") != key


# -- 9 side effects --------------------------------------------------------------------------------------------------------------------------------


def test_a_good_delivery_is_archived_once_and_a_bad_one_reported_each_time(
    example: Example, tmp_path: Path
) -> None:
    space = example("09-side-effects")
    office = tmp_path / "office"
    inputs = {"office": str(office)}
    assert runs_once(space, inputs) == ["check", "archive"]
    assert len(list((office / "archive").iterdir())) == 1
    assert not (office / "busy").exists()  # cleanup
    assert "quinces" in space.read("good.csv") and ",5" in space.read("rejected.csv")

    space.write("rows.csv", "name,amount\napples,3\npears,many\n")
    assert space.run(inputs) == ["check", "complain"]
    assert space.run(inputs) == ["complain"]
    assert (office / "complaints.txt").read_text() == "only 0.5 of the rows are good\n" * 2
    assert len(list((office / "archive").iterdir())) == 1


def test_an_optional_output_may_be_missing(example: Example, tmp_path: Path) -> None:
    space = example("09-side-effects")
    space.write("rows.csv", "name,amount\napples,3\n")
    runs_once(space, {"office": str(tmp_path / "office")})
    assert not (space.root / "rejected.csv").exists()


# -- 10 continued training -------------------------------------------------------------------------------------------------------------------------


def test_more_steps_continue_and_fewer_start_over(example: Example) -> None:
    space = example("10-continue")
    notes = []

    def trained(steps: int) -> dict[str, float]:
        assert space.run({"max_steps": steps}) == ["train"]
        notes.append(
            next(
                (
                    event.data.get("note")
                    for event in space.events
                    if event.after == "RUNNING" and event.subject == "step"
                ),
                None,
            )
        )
        return dict(json.loads(space.read("model.json")))

    assert trained(20)["began_at"] == 0
    continued = trained(40)
    assert continued["began_at"] == 20
    assert trained(30)["began_at"] == 0
    assert notes == [
        None,
        "resumes from step-20.json",
        "ignoring checkpoints that were trained with max_steps=40, more than requested now; starting over",
    ]

    assert space.run({"max_steps": 20}) == []  # remembered: its model is put back
    assert json.loads(space.read("model.json"))["step"] == 20
    unbroken = Space(space.root.with_name("unbroken"))
    shutil.copytree(EXAMPLES / "10-continue", unbroken.root, dirs_exist_ok=True)
    unbroken.run({"max_steps": 40})
    assert {**json.loads(unbroken.read("model.json")), "began_at": 20} == continued


# -- 11 a script of Hugging Face's -----------------------------------------------------------------------------------------------------------------


@pytest.mark.proof  # a minute
def test_a_script_of_hugging_face_trains_unchanged_and_goes_on_from_its_own_checkpoint(
    example: Example,
) -> None:
    pytest.importorskip("trl")
    space = example("11-trl-script")
    assert len(space.read("recipe.yaml").splitlines()) <= 30
    made = "from transformers import *; AutoModelForCausalLM.from_config(AutoConfig.from_pretrained('base')).save_pretrained('base')"
    shutil.copytree(Path(__file__).parent.parent / "fixtures/tiny-llama", space.root / "base")
    subprocess.run([sys.executable, "-c", made], cwd=space.root, check=True, capture_output=True)
    space.write(
        "rows/train.jsonl",
        "".join(json.dumps({"text": f"{n} follows {n - 1}"}) + "\n" for n in range(40)),
    )
    words = ("run", "base=./base", "rows=./rows", "--preset", "smoke", "--python", sys.executable)
    code, _, err = space.command(*words)
    assert code == 0, err
    code, _, err = space.command(*words, "max_steps=30")
    assert code == 0 and "resumes from checkpoint-20" in err, err
    rows = runner.results(workspace=space.root)
    assert sorted(
        row["max_steps"] for row in (rows.to_dict("records") if hasattr(rows, "to_dict") else rows)
    ) == [20, 30]


# -- 12 to 14 pipelines of three projects, written again -------------------------------------------------------------------------------------------


def test_an_ocr_model_is_new_or_goes_on_from_another(example: Example) -> None:
    space = example("12-ocr")
    assert "extract" not in runs_once(space)
    assert space.read("models/words.traineddata").startswith("new + 3 lines, 20 iterations, [1,36")
    space.write("best.traineddata", "best")
    assert space.run({"start_model": "./best.traineddata"}) == ["extract", "train"]
    assert space.read("models/words.traineddata").startswith("best + 3 lines")
    space.write("truth/iota.png", "P2 1 1 9 4")
    space.write("truth/iota.gt.txt", "iota")
    assert "lstmf[image=truth%2Fiota.png]" in space.run()
    assert space.read("lists/eval").split() == ["lstmf/gamma.lstmf", "lstmf/iota.lstmf"]


def test_a_translator_is_trained_with_and_without_back_translation(example: Example) -> None:
    space = example("13-translation")
    assert len(runs_once(space)) == 13
    assert space.read("student.model") == "model 1 of 6 lines\n"
    ran = space.run({"back_translate": True, "ensemble": 1})
    assert {"backward", "augmented", "score[ens=0]"} <= {*ran}
    assert space.summary is not None
    assert space.summary.skipped == ["score_ensemble: its `when` is false"]
    assert space.read("student.model") == "model 1 of 10 lines\n"


def test_a_model_is_packed_with_the_code_that_serves_it(example: Example) -> None:
    space = example("14-experiments")
    assert sorted(runs_once(space)) == ["data_split", "evaluate", "sagemaker", "train"]
    with tarfile.open(space.root / "model.tar.gz") as archive:
        files = {member.name for member in archive if member.isreg()}
    assert files == {"./handler.py", "./model.json"}
    assert json.loads(space.read("results/evaluate.json"))["leaked"] == []
    assert sorted(space.run({"lr": 0.1})) == ["evaluate", "sagemaker", "train"]
