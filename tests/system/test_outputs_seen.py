"""Outputs over REST: their types, steps and sizes, pictures drawn anew, previews; hostile files end in sentences, at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.outputs_space import EVIL, run_ids, served
from tests.servers.rest import Rest


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    with served(tmp_path_factory.mktemp("outputs")) as server:
        yield server


@pytest.fixture(scope="module")
def runs(rest: Rest) -> dict[str, str]:
    return run_ids(rest)


def preview(rest: Rest, run: str, name: str, path: str = "") -> Any:
    found = rest.ask("GET", f"/v1/runs/{run}/preview", params={"name": name, "path": path})
    assert found.status_code == 200, found.text
    return found.json()


def test_outputs_have_type_step_path_and_true_bytes(rest: Rest, runs: dict[str, str]) -> None:
    found = {
        each["name"]: each for each in rest.get(f"/v1/runs/{runs['red']}/artifacts")["artifacts"]
    }
    assert list(found) == ["train.made", "train.adapter", "plot.plot"]
    plot, adapter, made = found["plot.plot"], found["train.adapter"], found["train.made"]
    assert (plot["type"], plot["path"], plot["step"]) == ("image/png", "plot.png", None)
    raw = rest.ask("GET", f"/v1/runs/{runs['red']}/artifacts/plot.plot")
    assert plot["bytes"] == len(raw.content), "also of a file without a seal"
    assert adapter["type"] == "application/vnd.safetensors" and adapter["bytes"] > 65_000
    files = {each["path"]: each for each in made["files"]}
    assert made["type"] == "inode/directory"
    cat = files["samples/step-000020-cat.png"]
    assert (cat["type"], cat["step"]) == ("image/png", 20)
    assert (files["samples/step-000060.wav"]["type"], files["rows.csv"]["step"]) == (
        "audio/wav",
        None,
    )


def test_steps_have_their_key_and_cost(rest: Rest, runs: dict[str, str]) -> None:
    steps = rest.get(f"/v1/runs/{runs['red']}")["steps"]
    assert [(each["id"], len(each["key"]), each["cost"]) for each in steps] == [
        ("train", 64, 0.0),
        ("plot", 64, 0.0),
    ]


def test_a_picture_is_given_out_at_the_width_that_is_asked_for(
    rest: Rest, runs: dict[str, str]
) -> None:
    at = f"/v1/runs/{runs['red']}/artifacts/train.made"
    where = {"path": "samples/step-000020-cat.png", "width": 64}
    found = rest.ask("GET", at, params=where)
    assert found.headers["content-type"] == "image/webp" and found.content[8:12] == b"WEBP"
    assert len(found.content) < 3000 and found.headers["x-content-type-options"] == "nosniff"
    refused = rest.ask("GET", at, params={"path": "rows.csv", "width": 64})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "no-picture")
    assert rest.ask("GET", at, params=where | {"width": 100_000}).status_code == 422


def test_previews_show_text_rows_and_tensors(rest: Rest, runs: dict[str, str]) -> None:
    run = runs["red"]
    weights = preview(rest, run, "train.adapter")
    assert weights["kind"] == "tensors" and len(weights["rows"]) == 8
    assert weights["facts"]["parameters"] == "16,384 of F32"
    rows = preview(rest, run, "train.made", "rows.csv")
    assert (rows["columns"], rows["words"]) == (["prompt", "score"], "the first 50 rows")
    assert preview(rest, run, "train.made", "rows.jsonl")["columns"] == ["n", "text"]
    assert preview(rest, run, "train.made", "config.json")["text"].startswith('{\n  "hue": 3.0')
    assert preview(rest, run, "plot.plot")["facts"] == {"size": "160 × 160 pixels"}
    assert preview(rest, run, "train.made", "samples/step-000020.wav")["facts"]["rate"] == "8000 Hz"
    assert rest.ask("GET", f"/v1/runs/{run}/preview?name=train.made").status_code == 404
    assert rest.ask("GET", f"/v1/runs/{run}/preview?name=nothing").status_code == 404


HOSTILE = {
    "bomb.png": ("none", "more than 40 million pixels"),
    "script.svg": ("none", "is not shown"),
    "step-1.png": ("none", "is not shown"),
    "page.html": ("none", "is not shown"),
    "cut.safetensors": ("none", "the header length is 1000000000000000000 bytes"),
    "deep.json": ("text", "the first 65,536 characters"),
    "deep.jsonl": ("text", "shown as text"),
    "half.parquet": ("none", "Parquet"),
    "large.bin": ("none", "binary"),
    "large.txt": ("text", "the first 65,536 characters"),
    f"{EVIL}.csv": ("table", ""),
}


@pytest.mark.parametrize("path", HOSTILE)
def test_a_hostile_file_is_a_sentence_at_once(rest: Rest, runs: dict[str, str], path: str) -> None:
    kind, words = HOSTILE[path]
    begun = time.monotonic()
    found = preview(rest, runs["hostile@1"], "make.out", path)
    assert found["kind"] == kind and words in found["words"], found
    at = f"/v1/runs/{runs['hostile@1']}/artifacts/make.out"
    drawn = rest.ask("GET", at, params={"path": path, "width": 256})
    assert drawn.status_code == 422 and drawn.json()["error"]["code"] == "no-picture"
    assert time.monotonic() - begun < 8


def test_nothing_outside_of_the_store_is_read(rest: Rest, runs: dict[str, str]) -> None:
    run = runs["hostile@1"]
    ask = f"/v1/runs/{run}/artifacts/make.out"
    for path in ("passwd.txt", "../../../etc/passwd", "/etc/passwd"):
        for more in ({}, {"width": 64}):
            assert rest.ask("GET", ask, params={"path": path, **more}).status_code == 404
        found = rest.ask(
            "GET", f"/v1/runs/{run}/preview", params={"name": "make.out", "path": path}
        )
        assert found.status_code == 404
    (stored,) = rest.root.glob(".recipe/objects/*/*/page.html")
    os.chmod(stored.parent, 0o755)
    for put in (lambda: os.mkfifo(stored), lambda: stored.symlink_to("/etc/passwd")):
        stored.unlink()
        put()
        assert rest.ask("GET", ask, params={"path": "page.html"}).status_code == 404
        found = rest.ask(
            "GET", f"/v1/runs/{run}/preview", params={"name": "make.out", "path": "page.html"}
        )
        assert (found.status_code, found.json()["error"]["code"]) == (404, "not-stored")


# -- environment, inputs, checkpoints, links to share ---------------------------------------------


def test_a_run_knows_its_commit_diff_packages_and_machine(rest: Rest, runs: dict[str, str]) -> None:
    found = rest.get(f"/v1/runs/{runs['red']}/environment")
    code = found["code"]
    assert len(code["commit"]) == 40 and code["branch"] == "main" and not code["diff_cut"]
    assert "+# brighter than <img" in code["diff"] and "draw.py" in code["changed"]
    (python,) = found["pythons"]
    assert python["steps"] == ["train", "plot"] and python["version"].startswith("3.")
    assert any(each.startswith("pytest==") for each in python["packages"])
    assert found["machine"]["system"].startswith("Linux") and found["machine"]["cpus"] > 0
    assert [each["name"] for each in found["locks"]] == ["draw.py"] and found["words"] == []


def test_a_run_of_an_earlier_version_says_that_nothing_was_noted(
    rest: Rest, runs: dict[str, str]
) -> None:
    (kept,) = rest.root.glob(f".recipe/runs/{runs['paint@1']}/environment.json")
    for text in ("[" * 100_000, "7", '{"code": 7, "machine": [], "python": "x", "at": "now"}'):
        kept.write_text(text)
        found = rest.get(f"/v1/runs/{runs['paint@1']}/environment")
        assert found["code"] is None and len(found["words"]) == 1
    kept.unlink()
    assert "unknown" in rest.get(f"/v1/runs/{runs['paint@1']}/environment")["words"][0]


def test_inputs_stand_beside_their_defaults(rest: Rest, runs: dict[str, str]) -> None:
    found = rest.get(f"/v1/runs/{runs['red']}/inputs")
    hue, count, _ = found["inputs"]
    assert (hue["value"], hue["default"], hue["set_by"]) == (3, 1.0, "caller")
    assert hue["doc"] == "How much red a step adds"
    assert (count["value"], count["default"], count["set_by"]) == (60, 60, "")
    assert found["words"] == ""


def test_the_next_run_resumes_from_a_checkpoint_that_is_chosen(
    rest: Rest, runs: dict[str, str]
) -> None:
    at = f"/v1/runs/{runs['out of paint']}/checkpoints"
    found = rest.get(at)["checkpoints"]
    stands = [(each["number"], each["newest"], each["best"]) for each in found]
    assert stands == [
        (80, False, False), (60, True, False), (40, False, True), (20, False, False)
    ]  # fmt: skip
    asked = {"step": "train", "state": "points", "number": 40}
    done = rest.ask("POST", f"{at}/resume", asked)
    assert (done.status_code, done.json()) == (200, {"name": "step-40"}), done.text
    newest = {
        each["number"]: (each["newest"], each["aside"]) for each in rest.get(at)["checkpoints"]
    }
    assert newest == {80: (False, True), 60: (False, True), 40: (True, False), 20: (False, False)}
    assert rest.ask("POST", f"{at}/resume", asked | {"number": 60}).json() == {"name": "step-60"}
    assert rest.ask("POST", f"{at}/resume", asked | {"number": 7}).status_code == 404
    assert rest.ask("POST", f"{at}/resume", asked | {"state": "none"}).status_code == 404


def test_a_link_to_share_reads_its_run_alone_until_it_ends(
    rest: Rest, runs: dict[str, str]
) -> None:
    run, other = runs["red"], runs["paint@1"]
    made = rest.ask("POST", f"/v1/runs/{run}/shares", {"days": 2})
    assert made.status_code == 201
    token = made.json()["token"]
    for path in ("", "/artifacts", "/environment", "/inputs", "/checkpoints", "/metrics"):
        assert rest.ask("GET", f"/v1/runs/{run}{path}", token=token).status_code == 200, path
        assert rest.ask("GET", f"/v1/runs/{other}{path}", token=token).status_code == 404
    assert rest.ask("GET", "/v1/runs", token=token).status_code == 403
    for path in ("cancel", "retry", "shares", "checkpoints/resume"):
        body = {"step": "train", "state": "points", "number": 20} if "/" in path else {}
        assert rest.ask("POST", f"/v1/runs/{run}/{path}", body, token=token).status_code == 403
    assert rest.ask("GET", f"/v1/runs/{run}/shares", token=token).status_code == 403
    (share,) = rest.get(f"/v1/runs/{run}/shares")["shares"]
    assert "token" not in share and share["expires"][:10] > share["created"][:10]
    for path in (f"/v1/runs/{other}/shares/{share['id']}", f"/v1/runs/{run}/shares/x"):
        assert rest.ask("DELETE", path).status_code == 404
    assert rest.ask("DELETE", f"/v1/runs/{run}/shares/{share['id']}").status_code == 204
    assert rest.ask("GET", f"/v1/runs/{run}", token=token).status_code == 401
    assert rest.ask("POST", f"/v1/runs/{run}/shares", {"days": 1000}).status_code == 422
