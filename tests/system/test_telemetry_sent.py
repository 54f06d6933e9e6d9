"""What a platform is told of a run's numbers and log, line by line: those of its training, never back in step, and no samples of the host as a log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.execution.telemetry import Telemetry
from runner.planning.training import ReportingStep, find_training
from runner.storage.records.exchange import Chunk
from runner.storage.records.letters import ReportedNumbers
from runner.storage.records.runs import RunRow
from runner.storage.workspace import Workspace
from tests.servers.platforms import Platform, wrong
from tests.support import Space

TRAINED = """
inputs: {max_steps: {type: integer, default: 3}}
steps:
  train:
    run: 'echo "{\\"step\\": {{ inputs.max_steps }}, \\"loss\\": 0.25}" >> $RECIPE_METRICS; echo x > {{ outputs.o }}'
    metrics: true
    outputs: {o: weights}
  look:
    run: 'cat {{ steps.train.o }}; echo "{\\"step\\": 1, \\"perplexity\\": 2.5}" >> $RECIPE_METRICS; echo x > {{ outputs.o }}'
    metrics: true
    outputs: {o: report}
"""
RECIPE = """
inputs: {max_steps: {type: integer, default: 100}}
steps:
  data: {run: 'true > {{ outputs.o }}', metrics: true, outputs: {o: data}}
  train:
    run: 'echo {{ inputs.max_steps }} > {{ outputs.o }}; cat {{ steps.data.o }}'
    metrics: true
    state: {ckpt: {checkpoint: 'step-*'}}
    outputs: {o: weights}
  tune:
    run: 'cat {{ steps.train.o }} > {{ outputs.o }}'
    metrics: true
    state: {ckpt: {checkpoint: 'step-*'}}
    outputs: {o: tuned}
  evaluate: {run: 'cat {{ steps.tune.o }} > {{ outputs.o }}', metrics: true, outputs: {o: report}}
"""


class Job:
    """A run of `RECIPE` whose attempts write what a test says."""

    def __init__(self, root: Path, recipe: str = RECIPE) -> None:
        space = Space(root)
        space.recipe(recipe)
        environ = {"BACKEND_URL": "http://127.0.0.1:9", "JOB_ID": "j", "USER_ID": "u"}
        self.said: list[str] = []
        self.ws = Workspace.open(root, environ=environ)
        self.found = space.plan()
        self.ws.store.runs.submit(RunRow("r1", "t@1", "plan", {}, str(root)), "w")
        self.begin()

    def begin(self) -> None:
        """A worker takes the run."""
        letters = self.ws.letters
        assert letters is not None
        self.telemetry = Telemetry(self.ws, letters, "r1", self.found, self.said.append)

    def write(self, attempt: str, stream: str, *lines: object) -> None:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        self.telemetry.feed([Chunk(attempt, stream, 0, text.encode())])

    def steps(self, attempt: str, *steps: int, loss: float = 0.5) -> None:
        self.write(attempt, "metrics", *({"step": step, "loss": loss} for step in steps))

    def sent(self, kind: str) -> list[dict[str, object]]:
        """The points, or lines, that wait for the platform."""
        self.telemetry.flush()
        what = "metrics" if kind == "metrics" else "logs"
        bodies = [
            json.loads(each.body)
            for each in self.ws.store.runs.outbox.list_letters()
            if each.type == kind
        ]
        assert not any(wrong(kind, body) for body in bodies), bodies
        return [each for body in bodies for each in body[what]]

    @property
    def numbers(self) -> ReportedNumbers:
        return self.telemetry._numbers


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.ws.close()


def test_what_the_agent_measures_is_no_line_of_the_log_and_is_in_the_points(job: Job) -> None:
    job.write("train.1", "host", {"at": 1.0, "ram_used_gb": 8.8, "gpu_utilization_percent": 93.0})
    job.write("train.1", "log", "epoch 1", "")
    job.steps("train.1", 1)
    assert [line["message"] for line in job.sent("logs")] == ["epoch 1", ""]
    (point,) = job.sent("metrics")
    assert point["gpu_utilization_percent"] == 93.0 and "gpu_memory_allocated_gb" not in point


def test_a_gpu_that_only_the_agent_saw_has_its_memory_in_the_points(job: Job) -> None:
    job.write("train.1", "host", {"gpu_memory_used_gb": 20.5})
    job.steps("train.1", 1)
    job.write("train.1", "metrics", {"step": 2, "loss": 1, "gpu_memory_allocated_gb": 7.5})
    found = [point["gpu_memory_allocated_gb"] for point in job.sent("metrics")]
    assert found == [20.5, 7.5]


def test_numbers_of_other_steps_neither_move_the_training_nor_go_back(job: Job) -> None:
    job.write("data.1", "metrics", {"step": 9, "eval_loss": 7.0})
    job.steps("train.1", 19, 20, loss=0.25)
    job.write("evaluate.1", "metrics", {"step": 1, "perplexity": 83.6})
    assert [point["step"] for point in job.sent("metrics")] == [0, 19, 20, 20]
    assert job.numbers == (20, 100, 0.25, "train")


def test_a_training_that_begins_again_sends_only_steps_beyond_those_sent(job: Job) -> None:
    job.steps("train.1", 1, 2, 3)
    job.steps("train.2", 2)
    assert job.numbers.step == 2, "that is where it is now"
    job.steps("train.2", 3, 4)
    assert [point["step"] for point in job.sent("metrics")] == [1, 2, 3, 4]
    assert job.said == ["train repeats earlier steps: the platform gets only metrics after step 3"]


def test_the_next_worker_knows_what_was_sent(job: Job) -> None:
    job.steps("train.1", 1, 2, 3)
    job.telemetry.flush()
    job.begin()
    assert job.numbers == (3, 100, 0.5, "train"), "for the alerts, if it reports no more"
    job.steps("train.1", 1, 2, 3, 4)
    assert [point["step"] for point in job.sent("metrics")] == [1, 2, 3, 4]


def test_of_two_trainings_the_platform_gets_the_first_and_people_hear_it(job: Job) -> None:
    job.steps("train.1", 1, 2)
    job.steps("tune.1", 1, 2, 3)
    assert [point["step"] for point in job.sent("metrics")] == [1, 2]
    assert job.said == [
        "the platform gets the metrics of only one training step, train, not of tune"
    ]


def test_lines_of_each_process_of_a_step_are_lines_of_the_step(job: Job) -> None:
    job.write("train.1.3", "log", "by the fourth process")
    assert [line["step"] for line in job.sent("logs")] == ["train"]


@pytest.mark.parametrize("group", ["step", "epoch"])
def test_numbers_that_a_pattern_finds_in_the_log_are_sent_if_it_finds_the_step(
    tmp_path: Path, group: str
) -> None:
    pattern = f"(?P<{group}>[0-9]+) of 9, loss (?P<loss>[0-9.]+)"
    about = f"outputs: {{o: o}}, metrics: {{pattern: '{pattern}'}}"
    job = Job(tmp_path, f"steps:\n  train: {{run: 'echo x > {{{{ outputs.o }}}}', {about}}}\n")
    job.write("train.1", "log", "3 of 9, loss 0.5", "nothing", "4 of 9, loss 0.25")
    points = [(each["step"], each["train_loss"]) for each in job.sent("metrics")]
    job.ws.close()
    if group == "step":
        assert (points, job.said) == ([(3, 0.5), (4, 0.25)], [])
    else:
        assert (points, len(job.said)) == ([], 1) and "add a group `step`" in job.said[0]


def test_a_total_that_the_trainer_tells_counts_before_that_of_the_inputs(job: Job) -> None:
    job.write("train.1", "metrics", {"step": 1, "loss": 1.0, "max_steps": 40})
    assert job.numbers.total == 40


def test_the_numbers_of_a_training_that_is_restored_are_those_of_the_job(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.recipe(TRAINED)
    space.run()
    with Platform.service() as service:
        environ = service.environ(JOB_ID="j2")
        assert space.command("run", "./recipe.yaml", "-q", "--from", "look", env=environ)[0] == 0
        assert space.command("outbox", "deliver", env=environ)[0] == 0
    assert service.refused == []
    assert [(each["step"], each["perplexity"]) for each in service.points()] == [(3, 2.5)]
    last = service.bodies("alert")[-1]
    assert (last["loss"], last["current_step"], last["total_steps"]) == (0.25, 3, 3)


@pytest.mark.parametrize(
    ("steps", "training"),
    [
        ([], ""),
        ([ReportingStep("only")], "only"),
        ([ReportingStep("data", expected=900.0), ReportingStep("train", total=5.0)], "train"),
        ([ReportingStep("long", total=5.0, expected=9.0), ReportingStep("kept", True)], "kept"),
        ([ReportingStep("short", True, 5.0, 1.0), ReportingStep("long", True, 5.0, 2.0)], "long"),
        ([ReportingStep("first", True), ReportingStep("second", True)], "first"),
    ],
)
def test_the_training_is_what_keeps_checkpoints_then_counts_then_takes_longest(
    steps: list[ReportingStep], training: str
) -> None:
    assert find_training(steps) == training
