"""Promise: `--stack NAME` is a driver, its filters and limits by one name; one run at a time uses a stack, and a mistake is told where it stands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from runner import settings
from runner.errors import Invalid
from tests.fake_provider import Provider, provider
from tests.rented import rents
from tests.support import Space, until

STEP = "steps:\n  s: {run: 'echo 1 > o', outputs: {o: o}, resources: {gpus: 1}}\n"


def stack(space: Space, text: str, name: str = "tiny") -> None:
    """Add a stack to the settings of a workspace."""
    path = space.root / "recipe.toml"
    path.write_text((path.read_text() if path.exists() else "") + f"\n[stacks.{name}]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "said", "fix"),
    [
        ("gpu = 'L4'", "stacks.tiny has no driver", "Driver for the steps"),
        ("driver = 'vastia'", 'unknown driver "vastia"', 'did you mean "vastai"?'),
        (
            "driver = 'gcp'\nzome = 'a'",
            'unknown setting "stacks.tiny.zome"',
            'did you mean "zone"?',
        ),
        (
            "driver = 'gcp'\nkeep = 'forever'",
            'stacks.tiny.keep has an invalid value "forever"',
            "stopped: one machine",
        ),
        (
            "driver = 'gcp'\nauto_stop = '4h'",
            "stacks.tiny.auto_stop requires `keep`: it stops a persistent machine",
            'add `keep = "stopped"',
        ),
        (
            "driver = 'gcp'\nextra = {gpu = 'L4'}",
            "stacks.tiny.extra.gpu is a setting of the stack, not of its `extra`",
            "move `gpu = …` next to `driver`",
        ),
        (
            "driver = 'gcp'\nlimits = {cost = '5'}",
            'stacks.tiny.limits.cost has an invalid value "5"',
            "such as 5 USD",
        ),
    ],
)
def test_a_mistake_in_a_stack_is_reported_where_it_stands(
    space: Space, text: str, said: str, fix: str
) -> None:
    stack(space, text)
    with pytest.raises(Invalid) as caught:
        settings.load(space.root, {"XDG_CONFIG_HOME": "/nowhere"})
    (problem,) = caught.value.problems
    assert (
        said in problem.message
        and fix in problem.fix
        and problem.where is not None
        and problem.where.line >= 2
    )


def test_a_stack_names_driver_and_settings_and_leaves_those_of_the_driver(space: Space) -> None:
    space.write("recipe.toml", "[drivers.gcp]\nproject = 'p'\nmarket = 'spot'\n")
    stack(
        space,
        "driver = 'gcp'\ngpu = 'L4'\nzone = 'us-central1-a'\nmarket = 'any'\nextra = {image = 'i'}",
    )
    config = settings.load(space.root, {"XDG_CONFIG_HOME": "/nowhere"})
    wanted = {"project": "p", "market": "any", "image": "i", "gpu": "L4", "zone": "us-central1-a"}
    assert config.on("tiny").driver("gcp") == wanted and config.driver("gcp") == {
        "project": "p",
        "market": "spot",
    }
    assert ("stacks.tiny.gpu", "L4", f"{space.root}/recipe.toml:7") in settings.list_settings(
        config
    )


def test_a_flag_that_fights_the_stack_is_refused_in_a_sentence(space: Space) -> None:
    space.recipe(STEP)
    stack(space, "driver = 'loopback'")
    code, _, said = space.command("run", "--stack", "tiny", "--driver", "vastai")
    assert (
        code == 3
        and "the stack tiny uses the driver loopback, but --driver is vastai" in said
        and "remove `--driver`" in said
    )
    code, _, said = space.command("plan", "--stack", "tony")
    assert code == 3 and 'unknown stack "tony"' in said and 'did you mean "tiny"?' in said
    code, _, said = space.command("run", "--stack", "tiny", "--host", "me@there")
    assert code == 3 and "--host requires the driver ssh" in said


@pytest.fixture(scope="module")
def market() -> Iterator[Provider]:
    with provider("vastai") as found:
        yield found


def test_offers_of_a_stack_are_those_that_it_admits_and_a_flag_wins(
    space: Space, market: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    rents(space, market, monkeypatch, verified=False, reliability=0)
    stack(space, "driver = 'vastai'\ngpu = 'RTX 4090'\nmarket = 'spot'")

    def offered(*words: str) -> set[tuple[str, str]]:
        code, out, said = space.command("offers", "--stack", "tiny", "--json", *words)
        assert code == 0, said
        return {
            (offer["gpu"], offer["market"])
            for shelf in json.loads(out)
            for offer in shelf["offers"]
        }

    assert offered() == {("RTX 4090", "spot")}
    assert (
        {gpu for gpu, _ in offered("--where", "gpu=H100")}
        <= {"H100 SXM", "H100 NVL", "H100 PCIE"}
        != set()
    )
    space.recipe(STEP)
    code, out, _ = space.command("plan", "--stack", "tiny")
    assert code == 0 and "rents for s: vastai " in out and "RTX 4090" in out and ", spot, " in out


def test_limits_of_a_stack_hold_where_the_recipe_allows_more(space: Space) -> None:
    space.recipe("limits: {cost: 100 USD}\n" + STEP)
    stack(
        space, "driver = 'loopback'\nlimits = {cost = '0.001 USD'}\nextra = {price = 1.2, gpus = 1}"
    )
    code, _, said = space.command("run", "--stack", "tiny")
    assert code == 3 and "only $0.001 of `limits.cost` is left" in said


@pytest.mark.parametrize("queue", [True, False])
def test_one_run_at_a_time_uses_a_stack(space: Space, queue: bool) -> None:
    """The others wait, or end with exit 4."""
    space.recipe(
        f"steps:\n  s: {{run: 'echo > {space.root}/began; read go < {space.root}/gate; echo 1 > o', outputs: {{o: o}}}}\n"
    )
    space.recipe("steps:\n  s: {run: 'echo 2 > o2', outputs: {o: o2}}\n", name="other.yaml")
    os.mkfifo(space.root / "gate")
    stack(space, f"driver = 'loopback'\nqueue = {json.dumps(queue)}\nextra = {{hosts = 2}}")
    first = space.start("run", "--stack", "tiny")
    until((space.root / "began").exists)
    second = space.start("run", "./other.yaml", "--stack", "tiny")
    if not queue:
        _, said = second.communicate(timeout=60)
        assert (
            second.returncode == 4
            and f"process {first.pid} uses the stack tiny" in said
            and "queue = true" in said
        )
    else:
        assert second.stderr is not None and second.stdout is not None
        told = iter(second.stderr.readline, "")
        assert any(
            f"process {first.pid} uses the stack tiny: waiting for it" in line for line in told
        )
        assert not (space.root / "o2").exists()
    (space.root / "gate").write_text("go\n")
    assert first.wait(60) == 0
    first.communicate()
    if queue:
        second.communicate(timeout=60)
        assert second.returncode == 0 and space.read("o2") == "2\n"


def test_a_stack_may_choose_among_several_drivers_and_says_so(space: Space) -> None:
    space.write(
        "recipe.toml",
        "[drivers.loopback]\nprice = 1.2\n[stacks.cheap]\ndriver = 'any:loopback'\n",
    )
    space.recipe("steps: {s: {run: 'echo 1 > o', outputs: {o: o}}}\n")
    code, _, said = space.command("submit", "--stack", "cheap")
    assert code == 0 and "data and secrets may be sent to machines of loopback" in said
    code, out, said = space.command("run", "--stack", "cheap", "--yes", "--everything-there")
    assert code == 0 and space.read("o") == "1\n", said
    assert "the run's data and secrets may be sent to machines of loopback" in out + said
    for key, value in (("keep", "'stopped'"), ("zone", "'a'"), ("nodes", "2")):
        space.write("recipe.toml", f"[stacks.cheap]\ndriver = 'any:vastai,gcp'\n{key} = {value}\n")
        code, _, said = space.command("run", "--stack", "cheap")
        assert code == 3 and f"stacks.cheap.{key} requires a single driver" in said, said
