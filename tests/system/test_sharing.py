"""A store that several machines share: what was made there is a hit here, bytes come when they are needed, and nothing that is gone or wrong is used."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.storage.content.files import Content
from tests.servers.httpfaults import Fault, HttpFaults
from tests.servers.moto import Moto
from tests.support import Space, until

CHAIN: dict[str, Any] = {
    "inputs": {"word": {"type": "string", "default": "hello"}},
    "steps": {
        "base": {
            "run": "echo base; head -c 300000 /dev/zero | tr '\\0' b > {{ outputs.o }}",
            "outputs": {"o": "base.bin"},
        },
        "data": {
            "run": "mkdir -p d/sub; wc -c < {{ steps.base.o }} > d/size; echo {{ inputs.word }} > d/sub/word",
            "outputs": {"d": "d/"},
        },
        "train": {
            "run": "cat {{ steps.data.d }}/sub/word {{ steps.data.d }}/size > {{ outputs.m }}",
            "outputs": {"m": "model.txt"},
        },
    },
    "outputs": {"m": "{{ steps.train.m }}"},
}


class Machine(Space):
    """A workspace of its own that knows the shared store."""

    def __init__(self, root: Path, store: Path | str, *, push: bool = True, more: str = "") -> None:
        super().__init__(root)
        self.store = Path(store)
        self.write(
            "recipe.toml",
            f'store = "team"\n[stores.team]\nurl = "{store}"\npush = {json.dumps(push)}\n{more}',
        )
        self.recipe(CHAIN)

    def objects(self) -> list[str]:
        """What of the store's bytes is here."""
        return sorted(
            path.name
            for path in (self.root / ".recipe" / "objects").glob("*/*")
            if not path.name.endswith(".json")
        )

    def content(self, step: str) -> Content:
        survey = self.plan(store="none")
        made = survey.made[survey.plan.index[step]]
        return Content(next(iter(made.outputs.values())))

    def blob(self, content: Content) -> Path:
        return (
            self.store
            / "objects"
            / content[2:4]
            / (content[2:] + {"f": "", "x": ".x", "t": ".t.json"}[content[0]])
        )

    def looking(self, command: str) -> None:
        """One step more, which was made nowhere."""
        look = {"run": f"{command} > {{{{ outputs.l }}}}", "outputs": {"l": "list.txt"}}
        self.recipe(
            {
                **CHAIN,
                "steps": {**CHAIN["steps"], "look": look},
                "outputs": {**CHAIN["outputs"], "l": "{{ steps.look.l }}"},
            }
        )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def a(tmp_path: Path, store: Path) -> Machine:
    return Machine(tmp_path / "a", store)


@pytest.fixture
def b(tmp_path: Path, store: Path) -> Machine:
    return Machine(tmp_path / "b", store)


# -- hits


def test_what_was_made_elsewhere_is_a_hit_here(a: Machine, b: Machine) -> None:
    assert a.run() == ["base", "data", "train"]
    assert b.answers() == {"base": "fresh", "data": "fresh", "train": "restore"}
    assert b.run() == []
    assert b.read("model.txt") == a.read("model.txt") == "hello\n300000\n"


def test_what_was_made_elsewhere_brings_its_metrics_and_a_rule_of_ones_own_reads_files_alone(
    a: Machine, b: Machine
) -> None:
    text = """
steps:
  m: {run: 'echo loss=0.5; echo "{\\"f1\\": 1}" > m.jsonl', outputs: {o: m.jsonl}, metrics: %s}
  n: {run: "echo {{ steps.m.metrics.%s }} > n", outputs: {o: n}}
"""
    for machine in (a, b):
        machine.recipe(text % ("{pattern: 'loss=(?P<loss>.*)'}", "loss"))
    assert a.run() == ["m", "n"] and b.answers() == {"m": "restore", "n": "restore"}
    b.recipe(text % ("{file: m.jsonl}", "f1"))  # whose bytes are not here yet
    assert b.run() == ["n"] and b.read("n") == "1\n"
    b.recipe(text % ("{pattern: 'los.=(?P<loss>.*)'}", "loss"))
    assert b.run() == ["m"] and b.read("n") == "0.5\n"


def test_a_plan_says_where_it_was_found_and_what_it_will_fetch(a: Machine, b: Machine) -> None:
    a.run()
    code, out, err = b.command("plan")
    assert code == 0, err
    assert "cached in the shared store team" in out
    assert "outputs will be downloaded from the shared store team, 13 B" in out


def test_metadata_is_enough_for_a_hit(a: Machine, b: Machine) -> None:
    a.run()
    b.run()
    assert b.objects() == [a.content("train")[2:]], (
        "neither the base nor the data were fetched to show the model"
    )


def test_bytes_come_when_a_step_needs_them(a: Machine, b: Machine) -> None:
    a.run()
    b.looking("ls {{ steps.data.d }}")
    assert b.run() == ["look"]
    assert b.read("list.txt") == "size\nsub\n"
    assert a.content("base")[2:] not in b.objects()


def test_only_what_changed_runs_where_it_never_ran(a: Machine, b: Machine) -> None:
    a.run()
    assert b.run({"word": "other"}) == ["data", "train"]
    assert b.read("model.txt") == "other\n300000\n"


def test_what_is_known_here_needs_no_request(a: Machine, b: Machine, store: Path) -> None:
    a.run()
    b.run()
    store.rename(store.with_name("away"))
    assert b.answers() == {"base": "fresh", "data": "fresh", "train": "fresh"}
    assert b.command("run")[2].count("not used") == 0


def test_a_key_that_is_known_only_during_the_run_is_looked_for_then(
    a: Machine, b: Machine, store: Path
) -> None:
    """`base` has to run, comes out the same, and what follows is found."""
    a.run()
    for trace in store.glob("traces/*/*.json"):
        if json.loads(trace.read_text())["step"] == "base":
            trace.unlink()
    assert b.answers() == {"base": "run", "data": "maybe", "train": "maybe"}
    assert b.run() == ["base"]
    assert b.read("model.txt") == "hello\n300000\n"


def test_a_glob_below_an_output_made_elsewhere_is_known(a: Machine, b: Machine) -> None:
    steps = {
        "split": {
            "run": "mkdir -p p; for i in 1 2 3; do echo $i > p/$i.txt; done",
            "outputs": {"p": "p/"},
        },
        "each": {
            "matrix": {"f": {"glob": "p/*.txt"}},
            "run": "cat {{ matrix.f }} > {{ outputs.o }}",
            "outputs": {"o": "o/{{ matrix.f | stem }}"},
        },
    }
    for machine in (a, b):
        machine.recipe({"steps": steps})
    assert len(a.run()) == 4
    assert set(b.answers().values()) == {"restore"}
    assert b.run() == []
    assert b.read("o/3") == "3\n"


def test_steps_that_are_not_to_be_shared_are_not(a: Machine, b: Machine, store: Path) -> None:
    steps = {
        "always": {"run": "date +%N > {{ outputs.o }}", "outputs": {"o": "now"}, "cache": False},
        "nothing": {"run": "echo hi"},
        "scratch": {
            "run": "echo t > {{ outputs.t }}; echo o > {{ outputs.o }}",
            "outputs": {"t": {"path": "t", "temporary": True}, "o": "o"},
        },
    }
    for machine in (a, b):
        machine.recipe({"steps": steps})
    a.run()
    assert [json.loads(path.read_text())["step"] for path in store.glob("traces/*/*.json")] == [
        "scratch"
    ]
    assert len(list(store.glob("objects/*/*"))) == 1, "the temporary output stays where it was made"
    assert sorted(b.run()) == ["always", "nothing"]


def test_the_store_is_only_read_unless_it_says_otherwise(tmp_path: Path, store: Path) -> None:
    Machine(tmp_path / "c", store, push=False).run()
    assert list(store.rglob("*")) == []


# -- what is gone or wrong


def corrupt(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize("how", [Path.unlink, corrupt], ids=["gone", "corrupt"])
def test_a_hit_whose_bytes_cannot_be_had_runs_its_step_in_the_same_run(
    a: Machine, b: Machine, how: Callable[[Path], None]
) -> None:
    a.run()
    how(a.blob(a.content("train")))
    assert b.run() == ["train"]
    assert b.read("model.txt") == "hello\n300000\n"
    assert b.blob(a.content("train")).read_text() == "hello\n300000\n", "and the store is healed"


@pytest.mark.parametrize("how", [Path.unlink, corrupt], ids=["gone", "corrupt"])
@pytest.mark.parametrize(
    "lost", [("data",), ("train", "data"), ("train", "data", "base")], ids="-".join
)
def test_as_far_up_as_it_takes(
    a: Machine, b: Machine, how: Callable[[Path], None], lost: tuple[str, ...]
) -> None:
    """A step has to run, what it needs cannot be had, nor what that needs."""
    a.run()
    for step in lost:
        how(a.blob(a.content(step)))
    b.looking("cat {{ steps.train.m }} {{ steps.data.d }}/size")
    assert sorted(b.run()) == sorted([*lost, "look"])
    assert b.read("list.txt") == "hello\n300000\n300000\n"


def test_a_trace_of_another_key_is_none(a: Machine, b: Machine, store: Path) -> None:
    a.run()
    traces = sorted(store.glob("traces/*/*.json"))
    texts = [trace.read_text() for trace in traces]
    for trace, text in zip(traces, texts[1:] + texts[:1], strict=True):
        trace.write_text(text)
    assert b.run() == ["base", "data", "train"]


# -- a store that cannot be used


def test_a_store_that_cannot_be_used_is_reported_once_and_done_without(
    a: Machine, store: Path
) -> None:
    store.rmdir()
    code, _, err = a.command("run")
    assert code == 0
    assert err.count("continuing without the shared store team") == 1
    assert "is not a directory" in err
    assert a.read("model.txt") == "hello\n300000\n"


def test_one_that_was_asked_for_by_name_is_an_error(a: Machine, store: Path) -> None:
    store.rmdir()
    code, _, err = a.command("run", "--store", "team")
    assert (code, "is not a directory" in err, "fix:" in err) == (5, True, True)
    assert not (a.root / "model.txt").exists()
    assert a.command("plan", "--store", "nope")[0] == 3


def test_none_does_without(a: Machine, store: Path) -> None:
    code, _, err = a.command("run", "--store", "none")
    assert (code, "team" in err) == (0, False)
    assert list(store.iterdir()) == []


def test_what_cannot_be_put_there_fails_nothing(a: Machine, store: Path) -> None:
    (store / "objects").write_text("in the way")
    code, _, err = a.command("run")
    assert code == 0
    assert "cannot upload to the shared store team" in err
    assert a.answers(store="none") == {"base": "fresh", "data": "fresh", "train": "fresh"}


def test_a_wrong_settings_file_stops_a_run_before_it_starts(a: Machine) -> None:
    a.write("recipe.toml", 'stor = "x"\n')
    code, _, err = a.command("run")
    assert code == 3
    assert "recipe.toml:1:1" in err
    assert 'did you mean "store"?' in err


# -- push, pull, config, gc


def test_push_and_pull_carry_a_recipe_to_a_machine_without_a_network(
    tmp_path: Path, store: Path
) -> None:
    a, b = (Machine(tmp_path / name, store, push=False) for name in ("a", "b"))
    a.run()
    code, out, err = a.command("push")
    assert (code, out) == (0, "put 300 kB into team: 3 steps, 3 outputs\n"), err
    assert a.command("push")[1] == "put 0 B into team: 3 steps, 3 outputs\n"
    told = json.loads(b.command("pull", "--json")[1])
    assert (told["steps"], told["contents"], told["problems"]) == (3, 3, [])
    store.rename(store.with_name("away"))
    assert b.run() == []
    b.looking("ls {{ steps.data.d }}")
    assert b.run() == ["look"]


def test_push_all_puts_whatever_is_remembered(tmp_path: Path, store: Path) -> None:
    a, b = (Machine(tmp_path / name, store, push=False) for name in ("a", "b"))
    a.run()
    a.run({"word": "other"})
    assert json.loads(a.command("push", "--all", "--json")[1])["steps"] == 5
    assert b.run({"word": "other"}) == b.run() == []


def test_push_without_a_store_says_what_to_write(tmp_path: Path) -> None:
    space = Space(tmp_path / "s")
    space.recipe(CHAIN)
    space.run()
    code, _, err = space.command("push")
    assert (code, "store" in err, "[stores.NAME]" in err) == (3, True, True)


def test_what_is_lost_here_is_reported_by_push(tmp_path: Path, store: Path) -> None:
    a = Machine(tmp_path / "a", store, push=False)
    a.run()
    content = a.content("base")
    (a.root / ".recipe" / "objects" / content[2:4] / content[2:]).unlink()
    (a.root / "base.bin").unlink(missing_ok=True)
    code, _, err = a.command("push")
    assert code == 5
    assert "base: base.bin is no longer stored in this workspace" in err


def test_config_says_what_is_in_force_and_from_where_but_no_secret(
    a: Machine, tmp_path: Path
) -> None:
    user = tmp_path / "xdg" / "recipe"
    user.mkdir(parents=True)
    (user / "config.toml").write_text('[drivers.vast]\napi_key = "hush-hush"\nregion = "eu"\n')
    brought = (
        tmp_path / "site" / "vast-1.0.dist-info"
    )  # a driver of somebody else's, whose settings we do not know
    brought.mkdir(parents=True)
    (brought / "METADATA").write_text("Metadata-Version: 2.1\nName: vast\nVersion: 1.0\n")
    (brought / "entry_points.txt").write_text("[recipe.drivers]\nvast = vast:Vast\n")
    code, out, err = a.command(
        "config", env={"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "PYTHONPATH": str(brought.parent)}
    )
    assert code == 0
    assert (
        f"stores.team.push     true    {a.root}/recipe.toml:4".split()
        == next(line for line in out.splitlines() if "push" in line).split()
    )
    assert f"{user}/config.toml:2" in out
    assert "hush" not in out + err
    told = json.loads(a.command("config", "--json")[1])
    assert {"name": "store", "value": "team", "from": f"{a.root}/recipe.toml:1"} in told["settings"]


def test_gc_of_a_store_takes_a_day_to_take(a: Machine, store: Path) -> None:
    a.run()
    for trace in store.glob("traces/*/*.json"):
        os.utime(trace, (1, 1))
    told = json.loads(a.command("gc", "--store", "team", "-n", "--json")[1])
    assert (told["counts"]["trace"], told["dry_run"]) == (3, True)
    assert len(list(store.glob("traces/*/*.json"))) == 3
    code, out, _ = a.command("gc", "--store", "team")
    assert (code, "3 traces" in out, "a day later" in out) == (0, True, True)
    assert list(store.glob("traces/*/*.json")) == []
    assert len(list(store.glob("objects/*/*"))) > 3, "nothing that somebody may be reading went"


# -- S3


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


@pytest.fixture
def login(moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in moto.environ.items():
        monkeypatch.setenv(variable, value)


@pytest.mark.usefixtures("login")
def test_two_machines_and_a_bucket(tmp_path: Path, moto: Moto) -> None:
    bucket = f"s3://{moto.bucket()}/project"
    a, b = (
        Machine(tmp_path / name, bucket, more=f'endpoint = "{moto.endpoint}"\n')
        for name in ("a", "b")
    )
    assert a.run() == ["base", "data", "train"]
    assert b.run() == []
    assert b.read("model.txt") == "hello\n300000\n"


@pytest.mark.usefixtures("login")
def test_a_server_that_says_nothing_is_waited_for_once(
    tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.storage.remote.cache.PATIENCE", 0.5)
    silent = threading.Event()
    with HttpFaults(moto.endpoint) as proxy:
        proxy.spoil = lambda request: Fault(hold=silent)
        a = Machine(
            tmp_path / "a", f"s3://{moto.bucket()}/p", more=f'endpoint = "{proxy.endpoint}"\n'
        )
        try:
            assert a.run() == ["base", "data", "train"]
            assert len(proxy.requests) == 1, "a store that did not answer once is not asked again"
        finally:
            silent.set()


@pytest.mark.usefixtures("login")
def test_a_push_that_is_killed_leaves_nothing_half_and_the_next_one_ends_it(
    tmp_path: Path, moto: Moto
) -> None:
    with HttpFaults(moto.endpoint) as proxy:
        bucket = moto.bucket()
        a = Machine(
            tmp_path / "a", f"s3://{bucket}/p", push=False, more=f'endpoint = "{proxy.endpoint}"\n'
        )
        a.recipe(
            {
                "steps": {
                    "big": {
                        "run": "head -c 40000000 /dev/urandom > {{ outputs.o }}",
                        "outputs": {"o": "big.bin"},
                    }
                }
            }
        )
        a.run(store="none")
        third = threading.Event()
        proxy.spoil = lambda request: (
            Fault(hold=third)
            if request.method == "PUT" and "/objects/" in request.path and request.number >= 1
            else None
        )
        pushing = a.start("push")
        until(
            lambda: (
                sum(1 for r in proxy.requests if r.method == "PUT" and "/objects/" in r.path) >= 2
            )
        )
        pushing.send_signal(signal.SIGKILL)
        pushing.communicate()
        proxy.calm()
        third.set()

        def keys() -> list[str]:
            return [
                found["Key"] for found in moto.s3.list_objects_v2(Bucket=bucket).get("Contents", ())
            ]

        assert not [key for key in keys() if "/objects/" in key or "/traces/" in key]
        code, out, err = a.command("push")
        assert (code, out) == (0, "put 40.0 MB into team: 1 step, 1 output\n"), err
        assert sum("/objects/" in key for key in keys()) == 1
        assert not moto.s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.usefixtures("login")
@pytest.mark.parametrize("why", ["no bucket", "no credentials", "nobody there"])
def test_what_is_wrong_with_a_bucket_is_one_error_with_what_to_do(
    tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    endpoint = "http://127.0.0.1:9" if why == "nobody there" else moto.endpoint
    a = Machine(
        tmp_path / "a",
        "s3://no-such-bucket" if why == "no bucket" else f"s3://{moto.bucket()}",
        more=f'endpoint = "{endpoint}"\n',
    )
    if why == "no credentials":
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    code, _, err = a.command("pull")
    assert code == 5
    assert err.count("recipe:") == 1
    assert err.count("fix:") == 1
    assert "Traceback" not in err


def test_gc_forgets_manifests_of_trees_that_never_came(a: Machine, b: Machine) -> None:
    steps = {
        "split": {"run": "mkdir -p p; echo 1 > p/1.txt", "outputs": {"p": "p/"}},
        "each": {
            "matrix": {"f": {"glob": "p/*.txt"}},
            "run": "cat {{ matrix.f }} > {{ outputs.o }}",
            "outputs": {"o": "o/{{ matrix.f | stem }}"},
        },
    }
    for machine in (a, b):
        machine.recipe({"steps": steps, "outputs": {}})
    a.run()
    a.recipe({"steps": steps})
    b.plan()
    assert list(b.root.glob(".recipe/objects/*/*.t.json")), (
        "what is below the glob is known, though it is not here"
    )
    assert b.command("gc")[0] == 0
    assert not list(b.root.glob(".recipe/objects/*/*.t.json"))
    assert len(list(a.root.glob(".recipe/objects/*/*.t.json"))) == 1
    assert a.command("gc")[0] == 0
    assert len(list(a.root.glob(".recipe/objects/*/*.t.json"))) == 1


def test_trouble_in_the_middle_of_a_run_fails_nothing(a: Machine, b: Machine, store: Path) -> None:
    """The store goes away after the plan, although it was asked for by name."""
    a.run()
    for trace in store.glob("traces/*/*.json"):
        if json.loads(trace.read_text())["step"] == "base":
            trace.unlink()
    first = {
        "run": f"mv {store} {b.root}/gone; echo 1 > {{{{ outputs.o }}}}",
        "outputs": {"o": "first"},
    }
    base = {**CHAIN["steps"]["base"], "needs": ["first"]}
    b.recipe({"inputs": CHAIN["inputs"], "steps": {"first": first, **CHAIN["steps"], "base": base}})
    code, _, err = b.command("run", "--store", "team")
    assert code == 0, err
    assert b.read("model.txt") == "hello\n300000\n"
    assert "store team" in err
