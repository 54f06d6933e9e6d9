"""What is staged for an attempt: the caller's files, downloads, and outputs of earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import pytest

from runner.execution.steps import inputs
from runner.execution.steps.inputs import InputStager
from runner.planning.judge import StepResult
from runner.planning.step import GitSpec, Source, StepSpec, Upstream

PLAIN = StepSpec("", "a", {})
HERE: Any = Of(own_disk=False, elsewhere="", folder=Of(holds=lambda _content: False))
FAR: Any = Of(own_disk=True, elsewhere="far", folder=Of(holds=lambda _content: False))


def node(**more: Any) -> Any:
    return Of(
        **({"id": "a", "home": 0, "deps": [], "code": [], "takes": [], "upstream": []} | more)
    )


class Directory:
    """Notes what it is asked to stage."""

    path = "/attempts/a"

    def __init__(self) -> None:
        self.boxed, self.overlays = False, None
        self.objects: dict[str, str] = {}
        self.notices: dict[str, str] = {}
        self.doubtful, self.staged, self.recalled = list[str](), list[Any](), list[Any]()
        self.differs = ""
        self.queue: object = None

    def target_of(self, name: str) -> str:
        return f"{self.path}/{name}"

    def add_path(
        self, _cache: Any, at: str, content: Any, source: str, name: str,
        *, inputs: Any, copy: bool = False, group: str = "",
    ) -> None:  # fmt: skip
        self.staged.append((name, at, content, source, copy, group))
        self.by_link = inputs is None

    def add_part(self, _objects: Any, content: str, below: str, name: str) -> None:
        self.staged.append((name, "part", content, below))

    def add_object(self, _objects: Any, content: str, name: str, *, by_link: bool) -> None:
        self.staged.append((name, "object", content, by_link))

    def stage_queued_files(self, _cache: Any, inputs: Any) -> None:
        self.queue = inputs

    def recall_path(self, _cache: Any, at: str, content: str, source: str, name: str) -> bool:
        self.recalled.append((name, at, content, source))
        return name != self.differs

    def recall_object(self, content: str, name: str) -> bool:
        self.recalled.append((name, content))
        return name != self.differs


class Staging:
    """The inputs of a run in a workspace, without files."""

    def __init__(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, *, setting: str = "", refusal: str = ""
    ) -> None:
        self.root, self.said, self.stored = root, list[str](), set[str]()
        self.image = self.sandbox = ""
        self.fetched, self.forgotten, self.out = list[Any](), list[Any](), list[Any]()
        self.facts = Of(matches={}, files={}, code={}, takes={})
        self.made: dict[int, StepResult] = {}
        self.tried: list[str] = []

        def refuse(path: str) -> str:
            self.tried.append(path)
            return refusal

        monkeypatch.setattr(inputs, "Overlays", lambda _home: Of(refusal=refuse))
        monkeypatch.setattr(inputs, "StoredInputs", lambda *_words: "inputs")
        monkeypatch.setattr(inputs, "fetch", self._fetch)
        monkeypatch.setattr(inputs, "checkout", lambda _ws, *words: self.out.append(words))
        monkeypatch.setattr(inputs, "identify_files", self._identify)
        ws: Any = Of(
            root=root,
            home=root / ".recipe",
            config=Of(inputs=setting),
            cache=None,
            objects=Of(has=self.stored.__contains__, path=lambda content: f"/objects/{content}"),
            absolute=lambda path: root / path,
            addresses={"s3://secret/x"},
            store=Of(runs=Of(forget_opener=lambda *words: self.forgotten.append(words))),
        )
        parts: list[Any] = [
            Of(facts=self.facts, plan=Of(homes=["/recipes"]), made=self.made),
            Of(run="r", say=self.said.append),
            Of(
                container_image=lambda _spec, _place: self.image,
                sandbox=lambda _spec: self.sandbox,
            ),
        ]
        self.stager = InputStager(ws, *parts)

    def _fetch(self, _ws: Any, *words: Any) -> Path:
        self.fetched.append(words)
        return Path("/downloads/x")

    def _identify(self, _cache: Any, _folder: str, only: Sequence[str]) -> Any:
        return "now", {"a.csv": "f-a", "b.csv": "f-b"}

    def stage(
        self, of: Any, place: Any = HERE, spec: StepSpec = PLAIN, directory: Any = None
    ) -> Directory:
        found: Any = directory or Directory()
        self.stager.stage(of, spec, found, place)
        return found  # type: ignore[no-any-return]


Open = Callable[..., Staging]


@pytest.fixture
def open_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    return lambda **more: Staging(tmp_path, monkeypatch, **more)


def test_declared_files_are_staged_in_order_and_code_is_copied(open_run: Open) -> None:
    run = open_run()
    run.facts.matches = {"data/*": ["data/y", "data/x"]}
    run.facts.files = {"data/x": "f-x", "data/y": "f-y"}
    run.facts.code = {(0, "*.py"): [("train.py", "f-t")]}
    top = run.root
    found = run.stage(node(deps=["data/*", "alone"], code=["*.py", "missing"]))
    assert found.staged == [
        ("alone", "alone", None, f"{top}/alone", False, "alone"),
        ("data/x", "data/x", "f-x", f"{top}/data/x", False, "data/*"),
        ("data/y", "data/y", "f-y", f"{top}/data/y", False, "data/*"),
        ("train.py", "/recipes/train.py", "f-t", "/recipes/train.py", True, ""),
    ]
    assert found.queue == "inputs" and not found.by_link


def test_a_host_with_a_disk_of_its_own_gets_links(open_run: Open) -> None:
    run = open_run()
    run.made[0] = StepResult(True, {"o": "f-o"}, {})
    found = run.stage(node(deps=["x"], upstream=[Upstream(0, "o", "o.txt", "")]), FAR)
    assert found.by_link and found.staged[-1] == ("o.txt", "object", "f-o", True)


def test_git_repositories_are_checked_out_where_the_step_wants_them(open_run: Open) -> None:
    run = open_run()
    run.stage(node(), spec=PLAIN._replace(git=[GitSpec("../lib", "c0ffee", "vendor")]))
    assert run.out == [("/lib", "c0ffee", Path("/attempts/a/vendor"))]


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_path_of_the_caller_is_staged_with_what_its_key_says(
    open_run: Open, is_folder: bool
) -> None:
    run = open_run()
    if is_folder:
        (run.root / "in.txt").mkdir()
    run.facts.takes = {("path", "in.txt"): "f-in"}
    found = run.stage(node(takes=[Source("data", "path", "in.txt", ())]))
    source = f"{run.root}/in.txt"
    assert found.staged == [("data", source, "f-in", source, False, "")] and run.fetched == []


@pytest.mark.parametrize(("identity", "doubtful"), [("now", False), ("before", True)])
def test_selected_files_of_a_folder_are_staged_alone_and_compared(
    open_run: Open, identity: str, doubtful: bool
) -> None:
    run = open_run()
    (run.root / "data").mkdir()
    taken = Source("d", "path", "data", ("*.csv",))
    run.facts.takes = {taken.lookup_key: identity}
    found, top = run.stage(node(takes=[taken])), f"{run.root}/data"
    assert found.staged == [
        (f"d/{name}", f"{top}/{name}", content, f"{top}/{name}", False, "d")
        for name, content in (("a.csv", "f-a"), ("b.csv", "f-b"))
    ]
    assert found.doubtful == ([top] if doubtful else [])


def test_a_selection_in_what_is_a_file_stages_the_file(open_run: Open) -> None:
    run = open_run()
    (run.root / "data").write_text("x")
    taken = Source("d", "path", "data", ("*.csv",))
    run.facts.takes = {taken.lookup_key: "f-data"}
    assert [each[0] for each in run.stage(node(takes=[taken])).staged] == ["d"]


def test_models_and_buckets_are_downloaded_unless_the_host_has_them(open_run: Open) -> None:
    run = open_run()
    bucket, model = Source("x", "s3", "s3://b/x", ()), Source("m", "hf", "org/m", ("*.json",))
    run.facts.takes = {bucket.lookup_key: "etag", model.lookup_key: "hf:1"}
    found = run.stage(node(takes=[bucket, model]))
    assert run.fetched == [
        ("s3", "s3://b/x", "etag", ()),
        ("hf", "org/m", "hf:1", ("*.json",)),
    ]
    assert found.staged[0] == ("x", "/downloads/x", None, "/downloads/x", False, "")
    there = Directory()
    there.objects["x"] = "f-x"
    assert [
        each[0] for each in run.stage(node(takes=[bucket, model]), FAR, directory=there).staged
    ] == ["m"]
    assert run.forgotten == []


def test_a_streamed_data_set_is_not_downloaded(open_run: Open) -> None:
    run = open_run()
    found = run.stage(node(takes=[Source("s", "stream", "org/d", ())]))
    assert run.fetched == [] and found.staged == []


def test_the_opener_of_an_address_with_a_secret_is_forgotten_once_downloaded(
    open_run: Open,
) -> None:
    run = open_run()
    taken = Source("x", "s3", "s3://secret/x", ())
    run.facts.takes = {taken.lookup_key: "etag"}
    run.stage(node(takes=[taken]))
    assert run.forgotten == [("r", "s3://secret/x")]


@pytest.mark.parametrize(
    ("below", "place", "staged"),
    [
        ("", HERE, ("o", "object", "f-o", False)),
        ("part", HERE, ("o", "part", "f-o", "part")),
        ("part", FAR, ("o", "/objects/f-o/part", None, "/objects/f-o/part", False, "")),
    ],
)
def test_an_output_of_another_step_is_staged_as_a_whole_or_a_part_of_it(
    open_run: Open, below: str, place: Any, staged: object
) -> None:
    run = open_run()
    run.made[0] = StepResult(True, {"o": "f-o"}, {})
    assert run.stage(node(upstream=[Upstream(0, "o", "o", below)]), place).staged == [staged]


def test_an_optional_output_that_is_missing_is_left_out(open_run: Open) -> None:
    run = open_run()
    run.made[0] = StepResult(True, {}, {})
    of = node(upstream=[Upstream(0, "o", "o", "")])
    assert run.stage(of).staged == []
    directory: Any = Directory()
    assert run.stager.recall(of, directory) and directory.recalled == []


@pytest.mark.parametrize(("here", "by_reference"), [(False, True), (True, False)])
def test_an_output_that_only_the_host_has_is_a_reference(
    open_run: Open, here: bool, by_reference: bool
) -> None:
    run = open_run()
    run.made[0] = StepResult(True, {"o": "f-o"}, {})
    run.stored |= {"f-o"} if here else set()
    place = Of(own_disk=True, elsewhere="far", folder=Of(holds=lambda content: content == "f-o"))
    found = run.stage(node(upstream=[Upstream(0, "o", "o", "")]), place)
    assert found.objects == ({"o": "f-o"} if by_reference else {})
    assert bool(found.staged) == (not by_reference)


@pytest.mark.parametrize(
    ("setting", "place", "image", "sandbox", "overlaid"),
    [
        ("overlay", HERE, "", "", True),
        ("", HERE, "", "", False),
        ("overlay", FAR, "", "", False),
        ("overlay", HERE, "pytorch", "", False),
        ("overlay", HERE, "", "closed", False),
    ],
)
def test_only_open_steps_of_this_machine_may_change_their_inputs(
    open_run: Open, setting: str, place: Any, image: str, sandbox: str, overlaid: bool
) -> None:
    run = open_run(setting=setting)
    run.image, run.sandbox = image, sandbox
    found = run.stage(node(), place)
    assert (found.overlays is not None) == overlaid and found.boxed == bool(image)
    assert run.said == []


def test_overlays_that_do_not_work_are_given_up_with_a_message(open_run: Open) -> None:
    run = open_run(setting="overlay", refusal="no mounts")
    assert run.stage(node()).overlays is None and run.stage(node()).overlays is None
    assert len(run.tried) == len(run.said) == 1 and "(no mounts)" in run.said[0]


def test_the_reason_of_a_link_is_explained_once_in_a_run(open_run: Open) -> None:
    run = open_run()
    directory: Any = Directory()
    directory.notices = {"data": "it is linked"}
    run.stager.explain(node(), directory)
    run.stager.explain(node(id="b"), directory)
    directory.notices = {"data": "it is mounted", "model": "it is linked"}
    run.stager.explain(node(id="b"), directory)
    assert run.said == [
        "a: input data: it is linked",
        "b: input data: it is mounted",
        "b: input model: it is linked",
    ]


EARLIER = node(
    deps=["x"],
    code=["*.py"],
    takes=[
        Source("data", "path", "in.txt", ()),
        Source("some", "path", "dir", ("*.csv",)),
        Source("bucket", "s3", "s3://b/x", ()),
    ],
    upstream=[Upstream(0, "o", "o", ""), Upstream(0, "p", "p", "below")],
)


@pytest.mark.parametrize("differs", ["", "x", "train.py", "data", "o"])
def test_inputs_of_an_earlier_worker_are_compared_each(open_run: Open, differs: str) -> None:
    run = open_run()
    run.facts.files = {"x": None}
    run.facts.code = {(0, "*.py"): [("train.py", "f-t")]}
    run.facts.takes = {("path", "in.txt"): "f-in"}
    run.made[0] = StepResult(True, {"o": "f-o", "p": "t-p"}, {})
    directory: Any = Directory()
    directory.differs = differs
    assert run.stager.recall(EARLIER, directory) == (not differs)
    top = run.root
    assert directory.recalled == [
        ("x", "x", "", f"{top}/x"),
        ("train.py", "/recipes/train.py", "f-t", "/recipes/train.py"),
        ("data", f"{top}/in.txt", "f-in", f"{top}/in.txt"),
        ("o", "f-o"),
    ]
