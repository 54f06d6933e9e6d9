"""Promise: an input from a bucket goes to a host past this machine, is what the bucket holds, and its way is never what fails a run."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from drivers.base import Unreachable
from runner.execution.terms import Settings
from runner.hosts.link.stream import Stream
from runner.hosts.link.wire import Wire
from runner.hosts.transfer import pulling
from runner.secrets import Masker, Secret
from runner.settings import Config
from runner.storage.signed import opens
from tests.servers.fakegcs import FakeGcs
from tests.servers.httpfaults import Fault, HttpFaults, Request
from tests.servers.moto import Moto
from tests.servers.sshd import Sshd, sshd  # noqa: F401  (a fixture)
from tests.support import Space, until

LOOPBACK = Settings(driver="loopback")
SIZE = 1 << 20
FOLDER = "cd -P {{ inputs.data }} && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum"


def recipe(space: Space, run: str = FOLDER, more: str = "", step: str = "") -> None:
    space.recipe(
        f"inputs: {{data: {{type: dataset{more}}}}}\nsteps: {{s: {{run: 'here=$PWD; {{ {run}; }} > $here/o', outputs: {{o: o}}{step}}}}}\n"
    )


class Bucket:
    """A bucket with three files, and what is asked of it: by us and, with the agent's client, by hosts."""

    def __init__(self, moto: Moto, proxy: HttpFaults, space: Space) -> None:
        self.moto, self.proxy, self.space, self.name = moto, proxy, space, moto.bucket()
        self.address = f"s3://{self.name}/rows"
        self.files = {name: os.urandom(SIZE) for name in ("a.bin", "deep/b.bin", "c ü.bin")}
        for name, data in self.files.items():
            self.put(name, data)
        self.settings()

    def put(self, name: str, data: bytes) -> None:
        self.moto.s3.put_object(Bucket=self.name, Key=f"rows/{name}", Body=data)

    def settings(self, more: str = "[drivers.loopback]\n") -> None:
        self.space.write(
            "recipe.toml",
            f'[stores.b]\nurl = "s3://{self.name}/store"\nendpoint = "{self.proxy.endpoint}"\n{more}',
        )

    @property
    def listing(self) -> str:
        """What the step prints of these files."""
        names = sorted(self.files, key=lambda name: f"./{name}".encode())
        return "".join(
            f"{hashlib.sha256(self.files[name]).hexdigest()}  ./{name}\n" for name in names
        )

    def had(self, *, there: bool) -> list[str]:
        """Files that were asked for, by hosts or by us."""
        found = [
            each
            for each in self.proxy.requests
            if each.method == "GET" and each.path.endswith(".bin")
        ]
        return [each.path.rpartition("/")[2] for each in found if theirs(each) == there]

    def spoil(self, fault: Fault, number: int = -1) -> None:
        """What hosts ask for the file `a.bin`, once or each time."""

        def one(request: Request) -> Fault | None:
            right = (
                theirs(request)
                and request.path.endswith("a.bin")
                and number in (-1, request.number)
            )
            return fault if right else None

        self.proxy.spoil = one


def theirs(request: Request) -> bool:
    return request.headers.get("User-Agent", "").startswith("Python-urllib")


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as server:  # the one that checks signatures knows none in addresses
        yield server


@pytest.fixture
def bucket(moto: Moto, space: Space, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for variable, value in moto.environ.items():
        monkeypatch.setenv(variable, value)
    with HttpFaults(moto.endpoint) as proxy:
        recipe(space)
        yield Bucket(moto, proxy, space)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that go to hosts."""
    found: list[int] = []
    send = Stream.send

    async def counted(stream: Stream, *parts: bytes | memoryview) -> None:
        found.append(sum(map(len, parts)))
        await send(stream, *parts)

    monkeypatch.setattr(Stream, "send", counted)
    return found


def there(space: Space, host: int = 1) -> Path:
    return space.root / ".recipe" / "loopback" / f"host-{host}" / ".recipe-host"


def deny(monkeypatch: pytest.MonkeyPatch, word: str = "deny") -> None:
    """As the settings of a driver that rents may say."""
    monkeypatch.setattr(Config, "driver", lambda _self, _name: {"secrets": word})


def copies(space: Space) -> list[Path]:
    """Files of the input that are in our cache."""
    return [path for path in (space.root / ".recipe" / "cache").rglob("*.bin") if path.is_file()]


def test_a_folder_goes_from_its_bucket_to_a_host_and_no_byte_of_it_through_this_machine(
    bucket: Bucket,
    space: Space,
    sshd: Sshd,  # noqa: F811
    sent: list[int],
) -> None:
    keys = ("hosts", "known_hosts", "identity")
    bucket.settings(
        "[drivers.ssh]\nagent = false\n"
        + "".join(f"{key} = {sshd.settings()[key]!r}\n" for key in keys)
    )
    assert space.run({"data": bucket.address}, settings=Settings(driver="ssh")) == ["s"]
    assert space.read("o") == bucket.listing
    assert sorted(bucket.had(there=True)) == sorted(
        ["a.bin", "b.bin", "c%20%C3%BC.bin"]
    ) and not bucket.had(there=False)
    assert not copies(space) and sum(sent) < SIZE // 2
    assert not [*(sshd.home / ".recipe-host" / "partial").iterdir()]
    stored = b"".join(
        path.read_bytes()
        for top in (space.root, sshd.home)
        for path in top.rglob("*")
        if path.is_file()
    )
    assert b"X-Amz-Signature" not in stored and b"X-Amz-Credential" not in stored
    bucket.proxy.calm()
    recipe(space, f"{FOLDER}; echo 2")
    assert space.run({"data": bucket.address}, settings=Settings(driver="ssh")) == ["s"]
    assert not bucket.proxy.requests, "what it has is asked of the host alone"
    shutil.rmtree(sshd.home / ".recipe-host")
    recipe(space, f"{FOLDER}; echo 3")
    assert space.run({"data": bucket.address}, settings=Settings(driver="ssh")) == ["s"]
    assert len(bucket.had(there=True)) == 3 and space.read("o") == f"{bucket.listing}3\n"


def test_it_is_the_content_that_a_fetch_through_this_machine_has(
    bucket: Bucket, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(space, more=", only: [a*, deep/*]")
    space.run({"data": bucket.address}, settings=LOOPBACK)
    direct = {path.name for path in there(space).glob("objects/*/*.t")}
    del bucket.files["c ü.bin"]
    assert space.read("o") == bucket.listing and not copies(space) and len(direct) == 1
    shutil.rmtree(space.root / ".recipe")
    deny(monkeypatch)
    bucket.proxy.calm()
    space.run({"data": bucket.address}, settings=Settings(driver="loopback", overwrite=True))
    assert copies(space) and not bucket.had(there=True), "with secrets = deny no address is signed"
    assert {path.name for path in there(space).glob("objects/*/*.t")} == direct
    deny(monkeypatch, "send")
    shutil.rmtree(there(space))
    recipe(space, f"{FOLDER}; echo 2", more=", only: [a*, deep/*]")
    space.run({"data": bucket.address}, settings=LOOPBACK)
    assert len(bucket.had(there=True)) == 2, (
        "a host that lacks it has it from the bucket, though there is a copy here"
    )


def test_one_file_is_had_too_and_a_small_one_comes_from_here(
    bucket: Bucket, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(space, "sha256sum < {{ inputs.data }}")
    signed, learned, learn = list[str](), set[str](), Masker.learn
    monkeypatch.setattr(
        pulling, "opens", lambda addresses: signed.extend(addresses) or opens(addresses)
    )

    def heard(masker: Masker, secrets: Iterable[Secret]) -> None:
        some = list(secrets)
        learned.update(each.reveal for each in some)
        learn(masker, some)

    monkeypatch.setattr(Masker, "learn", heard)
    space.run({"data": f"{bucket.address}/a.bin"}, settings=LOOPBACK)
    assert len(signed) == 1 and parse_qs(urlsplit(signed[0]).query)["X-Amz-Signature"][0] in learned
    assert space.read(
        "o"
    ) == f"{hashlib.sha256(bucket.files['a.bin']).hexdigest()}  -\n" and not copies(space)
    bucket.put("small.bin", b"1")
    space.run(
        {"data": f"{bucket.address}/small.bin"},
        settings=Settings(driver="loopback", overwrite=True),
    )
    assert bucket.had(there=True) == ["a.bin"] and len(copies(space)) == 1


def test_two_nodes_have_it_each_for_itself(bucket: Bucket, space: Space) -> None:
    bucket.settings("[drivers.loopback]\nhosts = 2\n")
    recipe(space, f"{FOLDER}", step=", nodes: 2")
    space.run({"data": bucket.address}, settings=LOOPBACK)
    assert (
        space.read("o") == bucket.listing and len(bucket.had(there=True)) == 6 and not copies(space)
    )


PROOF = pytest.mark.proof


@pytest.mark.parametrize(
    "fault",
    [
        Fault(cut=300_000),
        *(
            pytest.param(each, marks=PROOF)
            for each in (Fault(reset=True), Fault(status=503), Fault(lost=True))
        ),
    ],
)
def test_a_connection_that_breaks_costs_what_was_under_way(
    bucket: Bucket, space: Space, fault: Fault
) -> None:
    bucket.spoil(fault, 0)
    space.run({"data": bucket.address}, settings=LOOPBACK)
    assert space.read("o") == bucket.listing and not copies(space)
    ranges = [
        each.headers.get("Range")
        for each in bucket.proxy.requests
        if theirs(each) and each.path.endswith("a.bin")
    ]
    assert ranges == [None, "bytes=300000-" if fault.cut else None]


def test_a_cut_of_the_way_to_the_host_costs_what_was_under_way(
    bucket: Bucket, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, cuts = Wire.stream, [1]

    async def cut(wire: Wire, *asked: object) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(stream(wire, *asked)) as found:  # type: ignore[arg-type, type-var]
            async for data in found:
                yield data
                if asked[0] == "pull" and cuts and b'"file"' in data:
                    raise Unreachable(f"cut {cuts.pop()}")

    monkeypatch.setattr(Wire, "stream", cut)
    space.run({"data": bucket.address}, settings=LOOPBACK)
    assert not cuts and space.read("o") == bucket.listing and not copies(space)
    assert len(bucket.had(there=True)) <= 5, "what was whole is not had again"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(status=403, code="AccessDenied"), "the bucket returned HTTP status 403"),
        pytest.param(
            Fault(headers={"Content-Length": str(SIZE + 1)}),
            f"the object has {SIZE + 1} bytes in the bucket, but {SIZE} were expected",
            marks=PROOF,
        ),
        pytest.param(
            Fault(headers={"ETag": '"0"'}), "the object changed in the meantime", marks=PROOF
        ),
        pytest.param(Fault(reset=True), "the host cannot connect to the bucket", marks=PROOF),
    ],
)
def test_what_a_host_cannot_have_goes_through_this_machine_and_is_told_once(
    bucket: Bucket, space: Space, fault: Fault, words: str
) -> None:
    bucket.spoil(fault)
    step = "{run: 'sha256sum {{ inputs.data }}/a.bin > X', outputs: {o: X}}"
    space.recipe(
        f"inputs: {{data: {{type: dataset}}}}\nsteps: {{s: {step.replace('X', 'o')}, t: {step.replace('X', 'p')}}}\n"
    )
    code, out, err = space.command("run", f"data={bucket.address}", "--driver", "loopback")
    assert code == 0, out + err
    assert (out + err).count(
        f"copying {bucket.address} to loopback host-1 through this machine: {words}"
    ) == 1, out + err
    assert (
        space.read("o").startswith(hashlib.sha256(bucket.files["a.bin"]).hexdigest())
        and len(copies(space)) == 3
    )
    assert not [*there(space).glob("partial/*")] and "X-Amz" not in out + err


def test_what_changes_meanwhile_is_refused(bucket: Bucket, space: Space) -> None:
    def change(request: Request) -> Fault | None:
        if theirs(request) and request.path.endswith("a.bin"):
            bucket.put("deep/d.bin", b"new")
        return None

    bucket.proxy.spoil = change
    space.attempt({"data": bucket.address}, settings=LOOPBACK)
    assert (
        space.summary is not None
        and "has changed since it was resolved" in space.summary.failed[0].reason
    )
    assert "--update" in space.summary.failed[0].hint and not (space.root / "o").exists()
    assert not [path for path in there(space).glob("objects/*/*") if path.stat().st_size >= SIZE]


def test_an_input_is_no_larger_than_its_limit(bucket: Bucket, space: Space) -> None:
    bucket.settings("[drivers.loopback]\n[limits]\ninput_gb = 0.002\n")
    space.attempt({"data": bucket.address}, settings=LOOPBACK)
    assert (
        space.summary is not None
        and "`[limits] input_gb` is 0.002" in space.summary.failed[0].reason
    )
    assert not bucket.had(there=True)


def test_a_host_that_answers_something_else_is_not_believed(
    bucket: Bucket, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pulling, "tree_stamp", lambda _entries: "0" * 64
    )  # as if it had other names there than it was asked for
    space.run({"data": bucket.address}, settings=LOOPBACK)
    assert space.read("o") == bucket.listing and len(copies(space)) == 3


def test_a_run_that_is_killed_meanwhile_is_gone_on_with_and_what_came_is_kept(
    bucket: Bucket, space: Space
) -> None:
    hold = threading.Event()
    bucket.spoil(Fault(hold=hold), 0)
    recipe(space, f"echo x >> {space.root}/begun; {FOLDER}")
    process = space.start("run", f"data={bucket.address}", "--driver", "loopback")
    until(
        lambda: (
            sum(path.stat().st_size for path in there(space).glob("partial/*/*/it/**/*.bin"))
            == 2 * SIZE
        )
    )
    process.send_signal(signal.SIGKILL)
    process.communicate()
    space.run({"data": bucket.address}, settings=LOOPBACK)
    hold.set()
    assert space.read("o") == bucket.listing and space.read("begun") == "x\n" and not copies(space)
    had = bucket.had(there=True)
    assert had.count("b.bin") == 1 and had.count("a.bin") == 2


def test_what_anybody_may_read_has_plain_addresses(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false"
    )  # gcsfs would ask by gRPC, which a played server leaves unanswered
    with FakeGcs() as gcs:
        name = gcs.bucket()
        data = os.urandom(SIZE)
        gcs.put(name, "rows/a.bin", data)
        space.write(
            "recipe.toml", f'[stores.g]\nurl = "gs://{name}/s"\nendpoint = "{gcs.endpoint}"\n'
        )
        deny(monkeypatch)
        recipe(space)
        space.run({"data": f"gs://{name}/rows"}, settings=LOOPBACK)
        assert space.read("o") == f"{hashlib.sha256(data).hexdigest()}  ./a.bin\n" and not copies(
            space
        )


@pytest.mark.proof
def test_a_kill_at_any_request_to_the_bucket_costs_nothing_that_was_whole(
    bucket: Bucket, space: Space
) -> None:
    killed, at = True, 0
    while killed:
        killed, seen = False, 0
        recipe(space, f"echo x >> {space.root}/begun-{at}; {FOLDER}")
        process = space.start("run", f"data={bucket.address}", "--driver", "loopback")

        def kill(_request: Request) -> Fault | None:
            nonlocal killed, seen
            if seen == at:  # noqa: B023
                process.send_signal(signal.SIGKILL)  # noqa: B023
                killed = True
            seen += 1
            return None

        bucket.proxy.spoil = kill
        out, err = process.communicate()
        assert killed or process.returncode == 0, out + err
        bucket.proxy.calm()
        space.run({"data": bucket.address}, settings=LOOPBACK)
        assert (
            space.read("o") == bucket.listing
            and space.read(f"begun-{at}") == "x\n"
            and not copies(space)
        )
        assert not [path for path in there(space).glob("partial/*/*") if path.name != ".alive"]
        shutil.rmtree(there(space))
        for note in (space.root / ".recipe" / "cache").glob("content-*"):
            note.unlink()
        at += 1
    assert at > 5


ODD = ("sp ace.txt", " lead.txt", "a%20b.txt", "a b/+#?.txt", "e\u0301.txt")


def test_keys_that_are_odd_names_arrive_at_a_host_as_they_are(bucket: Bucket, space: Space) -> None:
    for name in ODD:
        bucket.put(f"odd/{name}", name.encode())
    recipe(space, "cd {{ inputs.data }} && grep -rc . . | LC_ALL=C sort")
    space.run({"data": f"{bucket.address}/odd"}, settings=LOOPBACK)
    assert space.read("o").splitlines() == sorted(f"./{name}:1" for name in ODD)
    recipe(space, "cat {{ inputs.data }}")
    space.run({"data": f"{bucket.address}/odd/sp ace.txt"}, settings=Settings(overwrite=True))
    assert space.read("o") == "sp ace.txt"


def test_keys_that_are_no_files_are_named_and_left_out_when_that_is_asked(
    bucket: Bucket, space: Space
) -> None:
    for name in ("data", "data/x.txt", "data//y.txt", "data/../z.txt", "good.txt"):
        with contextlib.suppress(bucket.moto.s3.exceptions.ClientError):
            bucket.put(f"odd/{name}", name.encode())
    for address, words in (
        (f"{bucket.address}/odd", '"data//y.txt" contains an empty name'),
        (f"{bucket.address}/odd", '"data" is both an object and a prefix of other objects'),
        (f"{bucket.address}/odd/data", "is ambiguous: an object, and also a prefix"),
    ):
        for settings in (Settings(), LOOPBACK):
            space.attempt({"data": address}, settings=settings)
            assert space.summary is not None and words in str(space.summary.failed)
    recipe(space, "ls {{ inputs.data }}", more=", only: ['good*']")
    space.run({"data": f"{bucket.address}/odd"})
    assert space.read("o") == "good.txt\n"
