"""`--out s3://…` uploads results by their own names, says when all is there, sends what changed, and asks once where nothing did."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import runner
from runner.errors import Infrastructure, Invalid
from tests.servers.httpfaults import Fault, HttpFaults
from tests.servers.modelhub import ACCEPTED, EXPIRED, modelhub
from tests.servers.moto import Moto
from tests.support import Space

RECIPE: dict[str, Any] = {
    "steps": {
        "train": {"run": "echo learning; mkdir -p {{ outputs.m }}/sub; cp word {{ outputs.m }}/sub/word; ln -s sub/word {{ outputs.m }}/again",
                  "deps": ["word"], "outputs": {"m": "model/"}},
        "eval": {"run": "echo scoring; echo 0.5 > {{ outputs.s }}", "outputs": {"s": "score.txt"}},
    },
    "outputs": {"model": "{{ steps.train.m }}", "score": "{{ steps.eval.s }}"},
}  # fmt: skip


class Place(Space):
    """A workspace, and a bucket that its results go to, by way of a proxy that may spoil what passes."""

    def __init__(self, root: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        for name, value in moto.environ.items():
            monkeypatch.setenv(name, value)
        self.s3, self.bucket, self.proxy = moto.s3, moto.bucket(), HttpFaults(moto.endpoint)
        self.address = f"s3://{self.bucket}/results"
        self.write("word", "hello\n")
        self.recipe(RECIPE)
        self.through(self.proxy.endpoint)

    def through(self, endpoint: str) -> None:
        self.write(
            "recipe.toml", f'[stores.b]\nurl = "s3://{self.bucket}/any"\nendpoint = "{endpoint}"\n'
        )

    def up(self, *more: str) -> tuple[int, str]:
        code, _, err = self.command("run", "--out", self.address, *more)
        return code, err

    def names(self) -> list[str]:
        found = self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", ())
        return sorted(
            each["Key"].removeprefix("results/t@1/").partition("/")[2]
            or each["Key"].removeprefix("results/t@1/")
            for each in found
        )

    def get(self, name: str) -> bytes:
        return bytes(
            self.s3.get_object(Bucket=self.bucket, Key=f"results/t@1/{name}")["Body"].read()
        )

    @property
    def folder(self) -> str:
        return str(json.loads(self.get("latest.json"))["folder"])

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads(self.get(f"{self.folder}/_RECIPE.json")))

    def written(self) -> list[str]:
        """What was put since the last time somebody asked."""
        found = [
            unquote(request.path.partition("?")[0])
            for request in self.proxy.requests
            if request.method in ("PUT", "POST")
        ]
        self.proxy.requests.clear()
        return sorted(
            path.removeprefix(f"/{self.bucket}/results/t@1/").removeprefix(f"{self.folder}/")
            for path in found
        )


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:
        yield server


@pytest.fixture
def place(tmp_path: Path, moto: Moto, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    space = Place(tmp_path / "space", moto, monkeypatch)
    with space.proxy:
        yield space


def test_results_lie_under_their_own_names_and_a_manifest_that_was_written_last_lists_them(
    place: Place,
) -> None:
    code, err = place.up()
    assert code == 0 and f"results are at {place.address}/t@1/" in err
    logs = ["logs/eval.1.log", "logs/train.1.log"]
    assert place.names() == sorted(
        [
            "_RECIPE.json",
            "latest.json",
            *logs,
            "model/again",
            "model/sub/word",
            "report.html",
            "score.txt",
        ]
    )
    told = place.manifest()
    assert (
        told["complete"]
        and told["recipe"] == "t@1"
        and told["outputs"] == {"model": "model", "score": "score.txt"}
    )
    assert told["files"]["model/again"]["sha256"] == hashlib.sha256(b"hello\n").hexdigest()
    for name, each in told["files"].items():
        data = place.get(f"{place.folder}/{name}")
        assert (len(data), hashlib.sha256(data).hexdigest()) == (each["size"], each["sha256"])
    assert place.get(f"{place.folder}/logs/train.1.log") == b"learning\n" and b"<html" in place.get(
        f"{place.folder}/report.html"
    )
    assert place.read("score.txt") == "0.5\n"  # and here, as always
    last = [request.path for request in place.proxy.requests if request.method == "PUT"][-2:]
    assert [path.rpartition("/")[2] for path in last] == ["_RECIPE.json", "latest.json"]


def test_a_run_without_anything_to_do_asks_once_whether_the_results_are_there(place: Place) -> None:
    place.up()
    place.proxy.requests.clear()
    code, err = place.up()
    assert code == 0
    assert [(each.method, each.path.rpartition("/")[2]) for each in place.proxy.requests] == [
        ("HEAD", "_RECIPE.json")
    ]
    assert f"results are at {place.address}/t@1/{place.folder} at {place.proxy.endpoint}" in err


def test_results_that_are_not_there_any_more_are_uploaded_again(place: Place) -> None:
    place.up()
    for name in place.names():
        key = (
            f"results/t@1/{name}" if name == "latest.json" else f"results/t@1/{place.folder}/{name}"
        )
        if name != "latest.json":
            place.s3.delete_object(Bucket=place.bucket, Key=key)
    code, err = place.up()
    assert code == 0 and "no longer at" in err and "uploading them again" in err
    assert place.get(f"{place.folder}/model/sub/word") == b"hello\n"


def test_where_the_bucket_cannot_be_asked_nothing_is_called_uploaded(place: Place) -> None:
    place.up()
    place.proxy.spoil = lambda request: Fault(status=403, code="AccessDenied")
    code, err = place.up()
    assert code == 5 and "cannot check the results" in err and "fresh" not in err


def test_another_server_has_results_of_its_own(place: Place, moto: Moto) -> None:
    place.up()
    with HttpFaults(moto.endpoint) as other:
        place.through(other.endpoint)
        code, err = place.up()
        assert code == 0 and f"uploading results to {place.address}" in err


def test_what_was_made_before_is_uploaded_though_nothing_runs(place: Place) -> None:
    place.run()
    assert place.up()[0] == 0
    assert {
        "_RECIPE.json",
        "latest.json",
        "model/again",
        "model/sub/word",
        "score.txt",
        "report.html",
    } <= set(place.names())


def test_only_what_changed_is_sent_again(place: Place) -> None:
    place.up()
    place.written()
    place.write("word", "other\n")
    assert place.up()[0] == 0
    sent = place.written()
    assert "model/sub/word" in sent and "score.txt" not in sent and "logs/eval.1.log" not in sent
    assert sent.count("_RECIPE.json") == 2  # first that it is incomplete, at last what is there


def test_an_upload_that_breaks_fails_the_run_and_the_next_run_does_nothing_else(
    place: Place,
) -> None:
    place.proxy.spoil = lambda request: (
        Fault(status=403, code="AccessDenied")
        if request.method == "PUT" and "score" in request.path
        else None
    )
    code, err = place.up()
    assert (
        code == 5
        and "cannot upload the results" in err
        and "then run again to repeat only the upload" in err
    )
    state = json.loads(place.command("runs", "--json")[1])[0]
    assert state["state"] == "FAILED"
    place.proxy.spoil = lambda request: None
    code, err = place.up()
    assert code == 0 and "everything is fresh" in err
    told = place.manifest()
    assert (
        told["complete"] and told["run"] == state["id"] and "report.html" in told["files"]
    )  # of the run that made them


def test_a_bucket_that_is_not_there_is_refused_before_anything_runs(place: Place) -> None:
    place.address = "s3://no-such-bucket-of-ours/x"
    place.write(
        "recipe.toml", place.read("recipe.toml").replace(place.bucket, "no-such-bucket-of-ours")
    )
    code, err = place.up()
    assert code == 5 and "no-such-bucket-of-ours" in err
    assert not (place.root / "score.txt").exists()


def test_an_upload_that_is_cut_off_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    from runner.storage.buckets import results_folder
    from runner.storage.buckets.folder import FolderBucket

    class Dying(FolderBucket):
        left = 250

        def write(self, name: str, data: bytes) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            super().write(name, data)

    files = []
    for n in range(300):
        path = tmp_path / f"f{n}"
        path.write_text(f"{n}")
        files.append(results_folder.of_path(f"a/{n}", path))
    place = tmp_path / "place"
    place.mkdir()
    with pytest.raises(KeyboardInterrupt):
        results_folder.upload(Dying(str(place)), files, {}, lambda size: None)
    told = json.loads((place / "_RECIPE.json").read_text())
    assert not told["complete"] and len(told["files"]) == 200
    sent: list[int] = []
    results_folder.upload(FolderBucket(str(place)), files, {"run": "r"}, sent.append)
    told = json.loads((place / "_RECIPE.json").read_text())
    assert told["complete"] and len(told["files"]) == 300 and len(sent) == 100
    (place / "a/7").unlink()
    assert (
        results_folder.upload(FolderBucket(str(place)), files, {}, sent.append) == 1
    )  # what somebody deleted there comes back


# -- the Hub


@pytest.fixture(scope="module")
def hub() -> Iterator[Any]:
    with modelhub() as address:
        yield address


def hubbed(monkeypatch: pytest.MonkeyPatch, address: str, token: str) -> None:
    for name, value in {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_TOKEN": token}.items():
        monkeypatch.setenv(name, value)
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_model_is_one_commit_of_a_repository_on_the_hub(
    space: Space, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubbed(monkeypatch, hub, ACCEPTED)
    space.write("word", "hello\n")
    space.recipe({**RECIPE, "outputs": {"model": "{{ steps.train.m }}"}})
    code, _, err = space.command("run", "--out", "hf://me/lora")
    assert code == 0, err
    import urllib.request

    with urllib.request.urlopen(f"{hub}/_commits") as answer:
        commits = json.load(answer)
    assert [commit["repo"] for commit in commits] == ["models/me/lora"] and commits[0][
        "summary"
    ].startswith("t@1, run ")
    assert {"_RECIPE.json", "again", "sub/word", "report.html", "logs/train.1.log"} <= set(
        commits[0]["files"]
    )
    assert space.command("run", "--out", "hf://me/lora")[0] == 0
    with urllib.request.urlopen(f"{hub}/_commits") as answer:
        assert len(json.load(answer)) == 1


def test_a_token_that_is_none_is_refused_before_anything_runs(
    space: Space, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hubbed(monkeypatch, hub, EXPIRED)
    space.write("word", "hello\n")
    space.recipe(RECIPE)
    code, _, err = space.command("run", "--out", "hf://me/lora")
    assert code == 5 and "set HF_TOKEN" in err and not (space.root / "score.txt").exists()


# -- what is no place for results

MADE = 'steps: {s: {run: echo 1 > o, outputs: {o: o}}}\noutputs: {o: "{{ steps.s.o }}"}\n'


@pytest.mark.parametrize(
    "address",
    ["ssh://host/folder", "file:///tmp/x", "s3://", "s3://b/../x", "hf://name", "hf://a/b/c"],
)
def test_an_address_that_nothing_can_be_uploaded_to_is_refused_before_anything_runs(
    space: Space, address: str
) -> None:
    space.recipe(MADE)
    code, _, err = space.command("run", "--out", address)
    assert code == 3 and "fix: " in err
    assert [path.name for path in space.root.iterdir()] == ["recipe.yaml"]


def test_a_pack_is_not_written_into_an_address(space: Space) -> None:
    space.write("data/a", "a")
    code, _, err = space.command("pack", "data", "--out", "s3://bucket/pack")
    assert code == 3 and "--out s3://bucket/pack is an address" in err
    assert not (space.root / "s3:").exists()


@pytest.mark.parametrize("out", ["ssh://host/folder", Path("ssh://host/folder")])
def test_python_callers_are_refused_such_an_address_too(space: Space, out: str | Path) -> None:
    space.recipe(MADE)
    with pytest.raises(Invalid, match="ssh://host/folder"):
        runner.run("./recipe.yaml", workspace=space.root, out=out)


def test_python_callers_upload_too(place: Place) -> None:
    place.run(out=place.address)
    assert place.manifest()["complete"]
    place.proxy.spoil = lambda request: (
        Fault(status=403, code="AccessDenied") if request.method == "PUT" else None
    )
    place.write("word", "changed")
    with pytest.raises(Infrastructure, match="cannot upload the results"):
        place.attempt(out=place.address)


def test_a_folder_with_a_colon_is_a_folder(space: Space) -> None:
    space.recipe(MADE)
    space.run(out="a:b/c")
    assert space.read("a:b/c/o") == "1\n"


def test_an_output_is_no_address(space: Space) -> None:
    space.recipe('steps: {s: {run: "true", outputs: {o: "s3://bucket/o"}}}\n')
    code, _, err = space.command("run")
    assert code == 3 and 'output "o" of "s" is an address, "s3://bucket/o"' in err
