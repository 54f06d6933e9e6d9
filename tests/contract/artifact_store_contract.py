"""What every shared store promises, whatever it is made of.

A test module imports these and gives a fixture `raw`: somebody who can look at the store and break it behind our back.
`RECIPE_STORE_KEYS` objects are listed, in pages of 25 up to 1,000 of them (default 65; 1,005 are more than a page of any server).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from runner.errors import Corrupt, Infrastructure, Unusable
from runner.storage import checkpoints
from runner.storage.buckets import google, s3
from runner.storage.buckets.bucket import Bucket
from runner.storage.content.disk import delete
from runner.storage.content.files import Content, Entry, tree_id
from runner.storage.content.objects import Objects
from runner.storage.crew import Crew
from runner.storage.records.index import CachedOutput, Trace
from runner.storage.remote import layout as remote_layout
from runner.storage.remote import remote as remotes
from runner.storage.remote import states as remote_states
from runner.storage.remote.remote import Remote
from runner.storage.remote.session import MissingObject
from tests.tools import needs

KEYS = int(os.environ.get("RECIPE_STORE_KEYS", "65"))
DAY = 86_400.0


class Raw(Protocol):
    """The store, past our code."""

    def bucket(self) -> Bucket:
        """Another connection to the same store."""
        ...

    def get(self, name: str) -> bytes: ...
    def put(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...


@pytest.fixture
def here(tmp_path: Path) -> Objects:
    return local(tmp_path / "here")


@pytest.fixture
def there(tmp_path: Path) -> Objects:
    return local(tmp_path / "there")


@pytest.fixture
def remote(raw: Raw) -> Remote:
    return Remote(raw.bucket())


@pytest.fixture
def other(raw: Raw) -> Remote:
    """The same store, as another machine sees it."""
    return Remote(raw.bucket())


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that files of a few MB take several requests: S3's least."""
    monkeypatch.setattr(remote_layout, "PART", 5 << 20)
    monkeypatch.setattr(s3, "PART", 5 << 20)
    monkeypatch.setattr(google, "PART", 5 << 20)
    monkeypatch.setattr(remote_layout, "BUNDLE", 64 << 10)


def local(root: Path) -> Objects:
    for name in ("objects", "partial"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return Objects(root)


def noise(seed: object, size: int) -> bytes:
    import random

    return random.Random(str(seed)).randbytes(size)


def file(objects: Objects, tmp_path: Path, data: bytes, *, executable: bool = False) -> Content:
    path = tmp_path / "out"
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)
    return moved(objects, path)


def tree(objects: Objects, tmp_path: Path, files: dict[str, bytes]) -> Content:
    top = tmp_path / "tree"
    for name, data in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_bytes(data)
    top.mkdir(exist_ok=True)
    return moved(objects, top)


def moved(objects: Objects, path: Path) -> Content:
    """Take what is at `path`, and leave the name free for the next."""
    content = objects.take(path)
    delete(path)
    return content


def key(n: int) -> str:
    import hashlib

    return hashlib.sha256(b"key %d" % n).hexdigest()


def trace(n: int, *contents: Content) -> Trace:
    made = tuple(CachedOutput(f"o{i}", f"o{i}.txt", content) for i, content in enumerate(contents))
    return Trace(key(n), "tool@1", "step", "run", 1.0, 2.0, made, '{"loss":0.5}', '{"cpu":1.0}')


def name(content: Content) -> str:
    return remote_layout.object_name(content)


def names(raw: Raw, prefix: str = "") -> list[str]:
    return sorted(stat.name for stat in raw.bucket().names(prefix))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """All of these in threads that begin together."""
    answers: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def work(n: int) -> None:
        gate.wait()
        try:
            answers[n] = calls[n]()
        except BaseException as error:
            answers[n] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


# -- what is put there can be had


@pytest.mark.parametrize("size", [0, 1, 100_000, (5 << 20) + 1, (11 << 20)])
def test_a_file_arrives_as_it_was(
    remote: Remote, other: Remote, here: Objects, there: Objects, tmp_path: Path, size: int
) -> None:
    content = file(here, tmp_path, noise(size, size), executable=size == 1)
    assert remote.put(content, here) == size
    assert other.holds([content]) == {content}
    assert other.fetch(content, there) == size
    assert there.verify(content)
    assert there.path(content).read_bytes() == noise(size, size)


def test_a_tree_arrives_as_it_was(
    remote: Remote, other: Remote, here: Objects, there: Objects, tmp_path: Path
) -> None:
    top = tmp_path / "tree"
    (top / "deep" / "er").mkdir(parents=True)
    (top / "empty").mkdir()
    for n in range(40):
        (top / "deep" / f"{n}.txt").write_bytes(noise(n, 5_000))
    (top / "deep" / "er" / "large").write_bytes(noise("large", 6 << 20))
    (top / "middle").write_bytes(noise("middle", 300_000))
    (top / "twice").write_bytes(noise("middle", 300_000))
    (top / "run.sh").write_bytes(noise("middle", 300_000))
    (top / "run.sh").chmod(0o755)
    (top / "small.sh").write_bytes(noise(3, 5_000))
    (top / "small.sh").chmod(0o755)
    (top / "nothing").write_bytes(b"")
    (top / "lïnk").symlink_to("deep/3.txt")
    os.mkdir(os.fsencode(top) + b"/bad-\xff")
    (Path(os.fsdecode(os.fsencode(top) + b"/bad-\xff")) / "f").write_bytes(b"odd")
    content = here.take(top)
    remote.put(content, here)
    other.fetch(content, there)
    assert there.verify(content)
    assert there.manifests.entries(content) == here.manifests.entries(content)
    assert other.manifest(content) == here.manifests.entries(content)
    assert len([n for n in names_of(remote) if n.endswith(".t.parts")]) == 1


def names_of(remote: Remote) -> list[str]:
    return [stat.name for stat in remote.bucket.names("objects/")]


def test_what_is_there_is_not_sent_again(
    remote: Remote, other: Remote, here: Objects, tmp_path: Path
) -> None:
    contents = [file(here, tmp_path, b"a file"), tree(here, tmp_path, {"a": b"1", "b/c": b"2"})]
    assert all(remote.put(content, here) for content in contents)
    assert [other.put(content, here) for content in contents] == [0, 0]


def test_of_a_changed_tree_only_what_changed_is_sent(
    remote: Remote, other: Remote, here: Objects, tmp_path: Path
) -> None:
    files = {f"{n:03}": noise(n, 20_000) for n in range(200)} | {"large": noise("large", 2 << 20)}
    first = remote.put(tree(here, tmp_path, files), here)
    content = tree(here, tmp_path, files | {"100": b"another", "100a": b"one more"})
    assert first > 6_000_000
    assert other.put(content, here) < 2_500_000, (
        "a bundle or two and the manifest, of 200 files and a large one"
    )


def test_traces_are_found_by_key(
    remote: Remote, other: Remote, here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, b"made")
    remote.put(content, here)
    assert remote.tell(trace(1, content), {"o0": 4}) == trace(1, content)
    found = other.lookup([key(1), key(2)])
    assert {k: (one.trace, one.sizes) for k, one in found.items()} == {
        key(1): (trace(1, content), {"o0": 4})
    }


def test_more_than_a_page_is_listed_and_looked_up(
    raw: Raw, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    if KEYS <= 1000:
        monkeypatch.setattr(s3.S3, "page", 25)
        monkeypatch.setattr(google.Google, "page", 25)
        monkeypatch.setattr(remotes, "MANY", 30)
    content = Content("f:" + "0" * 64)
    wanted = [key(n) for n in range(KEYS)]
    bucket = raw.bucket()
    Crew(32).map(
        lambda n: bucket.write(
            remote_layout.trace_name(key(n)), remote_layout.trace_text(trace(n, content), {})
        ),
        range(KEYS),
    )
    assert names(raw, "traces/") == sorted(remote_layout.trace_name(k) for k in wanted)
    several = wanted[: remotes.MANY + 1]
    assert set(remote.lookup([*several, key(-1)])) == set(several)


# -- who is first


def test_the_first_trace_of_a_key_stays(
    remote: Remote, other: Remote, here: Objects, tmp_path: Path
) -> None:
    a, b = file(here, tmp_path, b"a"), file(here, tmp_path, b"b")
    for content in (a, b):
        remote.put(content, here)
    assert remote.tell(trace(1, a), {}) == trace(1, a)
    assert other.tell(trace(1, b), {}) == trace(1, a)
    assert other.lookup([key(1)])[key(1)].trace == trace(1, a)


def test_of_many_at_once_one_is_first_and_all_agree(
    raw: Raw, here: Objects, tmp_path: Path
) -> None:
    contents = [file(here, tmp_path, b"%d" % n) for n in range(4)]
    writers = [Remote(raw.bucket()) for _ in contents]
    for writer, content in zip(writers, contents, strict=True):
        writer.put(content, here)
    told = at_once(
        *[lambda w=w, c=c: w.tell(trace(1, c), {}) for w, c in zip(writers, contents, strict=True)]
    )
    assert len(set(told)) == 1
    assert Remote(raw.bucket()).lookup([key(1)])[key(1)].trace == told[0]


def test_two_who_put_the_same_at_once_both_succeed(
    raw: Raw, here: Objects, there: Objects, tmp_path: Path
) -> None:
    contents = [
        file(here, tmp_path, noise("big", 6 << 20)),
        tree(here, tmp_path, {f"{n}": noise(n, 9_000) for n in range(30)}),
    ]
    writers = [Remote(raw.bucket()) for _ in range(3)]
    for content in contents:
        answers = at_once(*[lambda w=writer, c=content: w.put(c, here) for writer in writers])
        assert not [answer for answer in answers if isinstance(answer, BaseException)], answers
        Remote(raw.bucket()).fetch(content, there)
        assert there.verify(content)


# -- nothing that is read is believed


def spoiled(raw: Raw, at: str, how: str) -> None:
    data = raw.get(at)
    if how == "flipped":
        raw.put(at, data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "truncated":
        raw.put(at, data[: len(data) // 2])
    elif how == "empty":
        raw.put(at, b"")
    else:
        raw.delete(at)


@pytest.mark.parametrize(
    ("what", "how"),
    [
        *[
            (what, how)
            for what in ("file", "bundle", "blob", "manifest", "parts")
            for how in ("flipped", "missing")
        ],
        *[
            ("large", "flipped"),
            ("large", "truncated"),
            ("file", "truncated"),
            ("bundle", "truncated"),
            ("blob", "empty"),
            ("manifest", "empty"),
        ],
    ],
)
def test_damage_is_found_named_and_never_used(
    raw: Raw,
    remote: Remote,
    other: Remote,
    here: Objects,
    there: Objects,
    tmp_path: Path,
    what: str,
    how: str,
) -> None:
    if what in ("file", "large"):
        content = file(here, tmp_path, noise(what, 1000 if what == "file" else 6 << 20))
        remote.put(content, here)
        at = name(content)
    else:
        content = tree(
            here, tmp_path, {"a": b"small a", "b": b"small b", "large": noise("l", 300_000)}
        )
        remote.put(content, here)
        parts = json.loads(raw.get(name(content)[:-4] + "parts"))
        bundle = parts["bundles"][0][0]
        at = {
            "bundle": f"objects/{bundle[:2]}/{bundle}",
            "blob": f"objects/{parts['blobs'][0][:2]}/{parts['blobs'][0]}",
            "manifest": name(content),
            "parts": name(content)[:-4] + "parts",
        }[what]
    spoiled(raw, at, how)
    with pytest.raises(MissingObject, match=at.replace(".", r"\.")):
        other.fetch(content, there)
    assert not there.has(content)
    assert not list((there.path(content).parents[2] / "partial").iterdir())
    # What was found bad is written anew by a writer that has it, and then it is good.
    other.put(content, here)
    other.fetch(content, there)
    assert there.verify(content)


def test_swapped_objects_are_found(
    raw: Raw, remote: Remote, other: Remote, here: Objects, there: Objects, tmp_path: Path
) -> None:
    a, b = file(here, tmp_path, b"content a"), file(here, tmp_path, b"content b")
    for content in (a, b):
        remote.put(content, here)
    data = raw.get(name(a))
    raw.put(name(a), raw.get(name(b)))
    raw.put(name(b), data)
    for content in (a, b):
        with pytest.raises(MissingObject):
            other.fetch(content, there)


@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "another's"])
def test_a_damaged_trace_is_none_and_is_replaced(
    raw: Raw, remote: Remote, other: Remote, here: Objects, tmp_path: Path, how: str
) -> None:
    content = file(here, tmp_path, b"made")
    remote.put(content, here)
    remote.tell(trace(1, content), {})
    at = remote_layout.trace_name(key(1))
    if how == "another's":
        remote.tell(trace(2, content), {})
        raw.put(at, raw.get(remote_layout.trace_name(key(2))))
    elif how == "flipped":
        raw.put(at, raw.get(at).replace(b'"step":"step"', b'"step":"stap"'))
    else:
        spoiled(raw, at, how)
    assert other.lookup([key(1)]) == {}
    assert other.tell(trace(1, content), {}) == trace(1, content)
    assert other.lookup([key(1)])[key(1)].trace == trace(1, content)


def test_a_trace_of_what_was_found_bad_is_replaced(
    raw: Raw, remote: Remote, other: Remote, here: Objects, there: Objects, tmp_path: Path
) -> None:
    first, second = file(here, tmp_path, b"first"), file(here, tmp_path, b"second")
    remote.put(first, here)
    remote.tell(trace(1, first), {})
    spoiled(raw, name(first), "flipped")
    with pytest.raises(MissingObject):
        other.fetch(first, there)
    other.put(second, here)
    assert other.tell(trace(1, second), {}) == trace(1, second), (
        "made again, and it came out otherwise"
    )
    assert Remote(raw.bucket()).lookup([key(1)])[key(1)].trace == trace(1, second)


HOSTILE = {
    "above": [Entry("../evil", "f", 4, "")],
    "absolute": [Entry("/tmp/evil", "f", 4, "")],
    "hidden": [Entry("a/../../evil", "f", 4, "")],
    "twice": [Entry("a", "f", 4, ""), Entry("a", "f", 4, "")],
    "through a link": [Entry("l", "l", 4, "d"), Entry("l/evil", "f", 4, "")],
    "a link out": [Entry("l", "l", 7, "../../x")],
    "an absolute link": [Entry("l", "l", 4, "/etc")],
    "a zero byte": [Entry("a\0b", "f", 4, "")],
    "no such kind": [Entry("a", "c", 4, "")],
    "a dot": [Entry(".", "f", 4, "")],
    "nothing": [Entry("", "f", 4, "")],
}


def test_a_manifest_whose_digest_is_right_may_still_not_leave_its_tree(
    raw: Raw, remote: Remote, here: Objects, there: Objects, tmp_path: Path
) -> None:
    evil = file(here, tmp_path, b"evil")
    remote.put(evil, here)
    before = sorted(str(path) for path in tmp_path.rglob("*") if "/store/" not in str(path))
    for case, rows in HOSTILE.items():
        manifest = [
            entry if entry.kind == "l" else entry._replace(value=evil[2:]) for entry in rows
        ]
        content = tree_id(manifest)
        count = len({entry.value for entry in manifest if entry.kind in "fx"})
        raw.put(name(content), json.dumps(manifest).encode())
        parts = {"small": 100, "bundles": [[evil[2:], count]] if count else [], "blobs": []}
        raw.put(name(content)[:-4] + "parts", json.dumps(parts).encode())
        with pytest.raises(MissingObject):
            remote.fetch(content, there)
        assert (
            sorted(str(path) for path in tmp_path.rglob("*") if "/store/" not in str(path))
            == before
        ), case


NONSENSE = (
    b"",
    b"[]",
    b'{"small":1,"bundles":[["../../x",1]],"blobs":[]}',
    b'{"small":1e9,"bundles":[],"blobs":[]}',
    b'{"small":-1,"bundles":[["%s",-5]],"blobs":[]}' % (b"0" * 64),
)


def test_parts_that_say_nonsense_are_refused(
    raw: Raw, remote: Remote, here: Objects, there: Objects, tmp_path: Path
) -> None:
    content = tree(here, tmp_path, {"a": b"1", "b": b"2"})
    remote.put(content, here)
    for parts in NONSENSE:
        raw.put(name(content)[:-4] + "parts", parts)
        with pytest.raises(MissingObject):
            remote.fetch(content, there)


def test_what_is_damaged_here_is_not_sent(
    raw: Raw, remote: Remote, here: Objects, tmp_path: Path
) -> None:
    for size in (1000, 6 << 20):
        content = file(here, tmp_path, noise(size, size))
        path = here.path(content)
        path.chmod(0o644)
        with path.open("r+b") as changed:
            changed.write(b"changed")
        with pytest.raises(Corrupt, match="does not match its digest"):
            remote.put(content, here)
    assert names(raw, "objects/") == []


# -- collecting


class Clock:
    """Days later, as a collector sees it; the server's own clock goes as it goes."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(raw: Raw, clock: Clock) -> Remote:
    return Remote(raw.bucket(), now=clock)


def test_what_a_trace_needs_is_never_collected(
    raw: Raw,
    remote: Remote,
    collector: Remote,
    clock: Clock,
    here: Objects,
    there: Objects,
    tmp_path: Path,
) -> None:
    kept = [
        file(here, tmp_path, b"kept", executable=True),
        tree(here, tmp_path, {"a": b"1", "b": noise("b", 300_000), "c/d": b"2"}),
    ]
    going = [
        file(here, tmp_path, b"going"),
        tree(here, tmp_path, {"e": b"1", "f": noise("f", 300_000)}),
    ]
    for content in kept + going:
        remote.put(content, here)
    remote.tell(trace(1, *kept), {})
    raw.put("objects/README", b"not ours")
    raw.put("objects/ab/" + "c" * 64, b"not ours: in a folder of another name")
    before = names(raw)
    for days in (0, 0.5, 2.0):
        clock.ahead = days * DAY
        dry = collector.collect(keep_days=100, dry=True)
        done = collector.collect(keep_days=100)
        assert (dry.traces, dry.objects, dry.size) == (done.traces, done.objects, done.size)
        assert done.traces == ()
        if days < 1:
            assert done.objects == ()
            assert done.waiting == 5, (
                "a file; of the tree its manifest, its parts, a bundle and a blob"
            )
            assert set(before) <= set(names(raw))
    assert len(done.objects) == 5
    fresh = Remote(raw.bucket())
    assert fresh.holds(kept + going) == set(kept)
    for content in kept:
        fresh.fetch(content, there)
        assert there.verify(content)
    assert raw.get("objects/README") == b"not ours"


def test_old_traces_go_and_then_what_they_needed(
    raw: Raw, remote: Remote, collector: Remote, clock: Clock, here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, b"old")
    remote.put(content, here)
    remote.tell(trace(1, content), {})
    clock.ahead = 40 * DAY
    assert collector.collect(keep_days=30, dry=True).traces == (key(1),)
    done = collector.collect(keep_days=30)
    assert (done.traces, done.objects, done.waiting) == ((key(1),), (), 1)
    assert Remote(raw.bucket()).lookup([key(1)]) == {}
    clock.ahead = 42 * DAY
    assert len(collector.collect(keep_days=30).objects) == 1
    assert names(raw, "objects/") == []


def test_a_checkpoint_is_restored_elsewhere_and_stays_as_long_as_its_note(
    raw: Raw, remote: Remote, collector: Remote, clock: Clock, there: Objects, tmp_path: Path
) -> None:
    made = checkpoints.choose(tmp_path / "a", {"steps": 10})
    for step in (1, 2):
        (made.path / "ckpt" / f"step-{step}").mkdir(parents=True)
        (made.path / "ckpt" / f"step-{step}" / "weights").write_text(str(step))
        remote_states.save(remote, "0" * 32, made.path, {"ckpt": f"step-{step}"})
    for days in (0, 2, 4):
        clock.ahead = days * DAY
        collector.collect(keep_days=30)
    note = remote_states.load(remote, "0" * 32)
    assert note is not None and remote_states.restore(remote, note, tmp_path / "b", there) == [
        "step-2"
    ]
    found = checkpoints.choose(tmp_path / "b", {"steps": 20})
    assert (found.id, (found.path / "ckpt/step-2/weights").read_text()) == (made.id, "2")
    assert remote_states.restore(remote, note, tmp_path / "b", there) == []
    for days in (40, 42):
        clock.ahead = days * DAY
        collector.collect(keep_days=30)
    assert names(raw, "objects/") == names(raw, "states/") == []


def test_a_damaged_note_is_none(raw: Raw, remote: Remote, tmp_path: Path) -> None:
    made = checkpoints.choose(tmp_path / "a", {})
    (made.path / "ckpt").mkdir()
    (made.path / "ckpt" / "step-1").write_text("1")
    remote_states.save(remote, "0" * 32, made.path, {"ckpt": "step-1"})
    data = raw.get("states/00/" + "0" * 32 + ".json") or b""
    for wrong in (b"", b"[]", b"{}", data[:-3], data.replace(b"step-1", b"../ste")):
        remote.write_note("0" * 32, wrong)
        assert remote_states.load(remote, "0" * 32) is None


def test_what_is_put_again_before_it_is_collected_stays(
    raw: Raw,
    remote: Remote,
    collector: Remote,
    clock: Clock,
    here: Objects,
    there: Objects,
    tmp_path: Path,
) -> None:
    contents = [
        file(here, tmp_path, b"idle"),
        tree(here, tmp_path, {"a": b"1", "b": noise("b", 300_000)}),
    ]
    for content in contents:
        remote.put(content, here)
    raw.put(
        "unreferenced.json",
        json.dumps({n: time.time() - 2 * DAY for n in names(raw, "objects/")}).encode(),
    )
    writer = Remote(raw.bucket(), now=lambda: time.time() + 0.6 * DAY)
    assert all(writer.put(content, here) for content in contents), (
        "older than half of the grace: written anew"
    )
    assert collector.collect(keep_days=30).objects == ()
    writer.tell(trace(1, *contents), {})
    clock.ahead = 5 * DAY
    assert collector.collect(keep_days=30).objects == ()
    for content in contents:
        remote.fetch(content, there)
        assert there.verify(content)


def test_a_collector_that_cannot_read_a_trace_takes_nothing(
    raw: Raw, remote: Remote, collector: Remote, clock: Clock, here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, b"x")
    remote.put(content, here)
    remote.tell(trace(1, content), {})
    spoiled(raw, remote_layout.trace_name(key(1)), "truncated")
    clock.ahead = 5 * DAY
    with pytest.raises(Corrupt, match=key(1)):
        collector.collect(keep_days=30)
    assert names(raw, "objects/") == [name(content)]


# -- the store itself


def test_a_newer_format_is_refused(raw: Raw, remote: Remote) -> None:
    raw.put("recipe-store.json", b'{"recipe-store": 2}')
    with pytest.raises(Unusable, match="format 2 is newer"):
        remote.lookup([key(1)])


def test_a_folder_that_is_something_else_is_refused(raw: Raw, remote: Remote) -> None:
    raw.put("recipe-store.json", b"<html>")
    with pytest.raises(Unusable, match="was not written by recipe"):
        remote.check()


def test_a_store_says_what_it_is(raw: Raw, remote: Remote, other: Remote) -> None:
    remote.mark()
    other.mark()
    assert json.loads(raw.get("recipe-store.json")) == {"recipe-store": 1}
    other.check()


def test_a_full_disk_here_is_reported_and_leaves_nothing(
    remote: Remote, here: Objects, tmp_path: Path
) -> None:
    content = file(here, tmp_path, noise("full", 200_000))
    remote.put(content, here)
    with tiny_disk(tmp_path) as root:
        objects = local(root)
        with pytest.raises(Infrastructure, match="No space left") as caught:
            remote.fetch(content, objects)
        assert "free disk space" in caught.value.fix
        assert list((root / "partial").iterdir()) == []
        assert not objects.has(content)


class tiny_disk:
    """A file system of 64 KiB, where tests run as root."""

    def __init__(self, tmp_path: Path) -> None:
        self._root = tmp_path / "tiny"

    def __enter__(self) -> Path:
        import subprocess

        needs("mount")
        self._root.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(self._root)], check=True
        )
        return self._root

    def __exit__(self, *_: object) -> None:
        import subprocess

        subprocess.run(["umount", "-l", str(self._root)], check=True)
