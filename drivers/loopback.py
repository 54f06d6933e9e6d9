"""Loopback driver for tests: directories of this machine act as remote machines, with faults on
request.

The reference implementation of a driver.  `host-N` below the root is a machine's home directory,
and `leases/` records the slots in use. Commands run for real, but with an empty environment, and
files are copied only through `call`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from . import calls, machine
from .base import (
    NOTHING,
    ROOT,
    Argv,
    Denied,
    Driver,
    Host,
    HostLost,
    Lease,
    NoCapacity,
    Offer,
    Order,
    Rejected,
    Resources,
    Throttled,
    Traits,
    Unreachable,
    Unsure,
    Wish,
    file_name,
    suggest,
)


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of the loopback driver: their kinds and numbers of occurrences.

    All numbers are counted from the creation of the root, over all processes that use it. 0 means
    never. The first orders are refused with Throttled, then with Denied, then with NoCapacity. A
    `call` is any start of a program on a host: the agent's, which runs all jobs, is one, and each
    that answers file requests is another.
    """

    no_offers: int = 0  # number of queries without offers
    throttled: int = 0  # number of orders that are throttled
    after: float = 0.01  # seconds to wait after throttling
    denied: int = 0  # number of orders that are denied
    no_capacity: int = 0  # number of orders without capacity
    coming: int = 0  # number of `hosts` calls per lease that return None
    lost_on_poll: int = 0  # number of the `hosts` call that loses the host
    lost_on_call: int = 0  # number of the `call` that loses the host with all its programs
    keeps_disk: bool = False  # a lost host comes back with its disk
    unreachable_on_call: int = 0  # number of the first call that fails as unreachable
    unreachable: int = 1  # number of consecutive unreachable calls
    dark: int = 0  # number of hosts, in order of their calls, that never answer again
    cut_on_call: int = 0  # number of the call whose connection breaks
    cut_after: int = 0  # bytes until it breaks, in both directions together
    silent: int = 0  # number of unreachable requests to the provider
    unsure: int = 0  # number of successful orders whose reply is lost
    garbled: int = 0  # number of successful orders whose reply is invalid
    unlisted: int = 0  # number of listings without the newest lease
    kept: int = 0  # number of failed releases
    disk: int = 0  # bytes that can be uploaded until the disks of all hosts are full
    bytes_per_second: int = 0  # in each direction

    @classmethod
    def read(cls, given: str | Mapping[str, object]) -> Faults:
        """Parse faults from JSON or a settings table. Raises Rejected for unknown faults."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise Rejected(f"these faults are not JSON: {error}") from error
        if not isinstance(given, Mapping):
            raise Rejected(
                'invalid faults: expected a table of fault names and numbers, such as {"no_capacity": 2}'
            )
        known = {field.name: type(field.default) for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise Rejected(f'there is no fault "{name}"{suggest(name, known)}')
            if not _is_amount(value, known[name]):
                raise Rejected(f"the fault {name} is a {known[name].__name__}, not {value!r}")
        return cls(**given)  # type: ignore[arg-type]  # looked at above


def _is_amount(value: object, kind: type) -> bool:
    """Return True for a value of this type that is not negative. A float may be a whole number."""
    if not isinstance(value, (int, float)) or value < 0:
        return False
    # A bool is an int in Python.
    if isinstance(value, bool):
        return kind is bool
    return kind is float or isinstance(value, kind)


class _Rented(NamedTuple):
    """A slot in use.

    `state` is empty, or `kept` or `stopped` for a machine that is stopped at its end time instead
    of destroyed.
    """

    lease: Lease
    until: float
    state: str


class _Faulty:
    """Injector of the configured faults, which counts occurrences in files below `root`."""

    def __init__(self, faults: Faults, root: Path) -> None:
        self._faults, self._folder = faults, root / "faults"

    def count_request(self) -> None:
        """Count a request to the provider, and raise Unreachable for an injected fault."""
        if self.count("asked", self._faults.silent) <= self._faults.silent:
            raise Unreachable("the provider does not answer")

    def count(self, what: str, wanted: int, more: int = 1) -> int:
        """Count an occurrence of a fault, and return the number so far.

        If no fault is `wanted`, return a number above any fault.
        """
        if not wanted:
            return sys.maxsize
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / what).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            count = int(file.read() or 0) + more
            file.truncate(0)
            file.write(str(count))
        return count

    def dark(self, host: str) -> bool:
        """Return True if the host has become permanently unreachable by an injected fault."""
        into, most = self._folder / "dark" / host, self._faults.dark
        if into.exists() or not most:
            return into.exists()
        if self.count("darkened", most) <= most:
            into.parent.mkdir(exist_ok=True)
            into.touch()
        return into.exists()

    def refuse(self) -> None:
        """Raise DriverError for an order if a fault is due."""
        faults = self._faults
        patience = faults.throttled + faults.denied + faults.no_capacity
        asked = self.count("orders", patience)
        if asked <= faults.throttled:
            raise Throttled(after=timedelta(seconds=faults.after))
        if asked <= faults.throttled + faults.denied:
            raise Denied("the account may not rent here")
        if asked <= patience:
            raise NoCapacity


class Loopback(Driver):
    """Driver that simulates machines as directories below `root`.

    Each of the `hosts` has room for `slots` leases. `python` is the interpreter's name on them.
    `addresses` are the network addresses of the nodes of a step, in the order of the hosts. The
    default is this machine's loopback address.

    With a `price`, in US dollars per hour, it simulates a provider: each lease is a separate
    machine with `gpus`, which is up `boots` seconds after the order. The machine and its disk are
    destroyed at release or at the end time. `provider.jsonl` below the root records each event.
    """

    traits = Traits(replays=True, visits=True, pauses=True)

    def __init__(
        self,
        root: Path | str,
        *,
        hosts: int = 1,
        slots: int = 1,
        python: str = "python3",
        price: float = 0.0,
        boots: float = 0.0,
        gpus: int = 0,
        addresses: Sequence[str] = (),
        faults: Faults | str | Mapping[str, object] | None = None,
    ) -> None:
        if not isinstance(hosts, int):
            raise Rejected(f"loopback has a number of hosts, not {hosts!r}")
        self._price, self._boots, self._gpus = float(price), float(boots), gpus
        if price:
            slots, short = 1, timedelta(seconds=0.05)
            self.traits = self.traits._replace(
                priced=True, settles=short, poll=short, ends="provider", hosts_at_once=hosts
            )
        self._root = Path(root).absolute()
        self._names = [f"host-{number}" for number in range(1, hosts + 1)]
        self._addresses = dict(zip(self._names, addresses, strict=False))
        self._slots = slots
        self._python = python
        # The system may have no python3.
        self._agent_python = sys.executable if python == "python3" else python
        self._faults = faults if isinstance(faults, Faults) else Faults.read(faults or {})
        self._faulty = _Faulty(self._faults, self._root)
        self._made: dict[str, LoopbackHost] = {}

    async def offers(self, wish: Wish) -> Sequence[Offer]:
        """Return the machines, with free slots first. All have this machine's resources."""
        self._faulty.count_request()
        if self._faulty.count("offers", self._faults.no_offers) <= self._faults.no_offers:
            return ()
        with _translate_errors():
            self._root.mkdir(parents=True, exist_ok=True)
        question = calls.call(
            machine.question(str(self._root)), NOTHING, _environment(self._root), self._root
        )
        have = machine.parse_resources(machine.facts(b"".join([data async for data in question])))
        if self._gpus:
            have = replace(have, gpus=self._gpus, gpu="loopback", gpu_memory=have.memory)
        if not machine.satisfies(have, wish):
            return ()
        taken = [lease.data["host"] for lease in self._leases()]
        free_first = sorted(self._names, key=lambda name: taken.count(name) >= self._slots)
        return tuple(self._offer(name, have) for name in free_first)

    def _offer(self, name: str, have: Resources) -> Offer:
        return Offer(
            "loopback",
            name,
            have,
            price=self._price,
            disk_price=self._price / 10,
            fetched=time.time(),
        )

    async def acquire(self, order: Order) -> Lease:
        """Take a slot on a machine, or extend the lease. Raises NoCapacity if all are in use."""
        name = order.offer.id
        if name not in self._names:
            raise Rejected(f'unknown host "{name}" (known: {", ".join(self._names)})')
        self._faulty.count_request()
        self._faulty.refuse()
        with self._alone():
            self._expire()
            known = {lease.key: lease for lease in self._leases()}
            taken = sum(lease.data["host"] == name for lease in known.values())
            if order.key not in known and taken >= self._slots:
                raise NoCapacity(f"all slots on {name} are in use ({self._slots})")
            data = {"host": name, "root": str(self._root / name / ROOT), "python": self._python}
            if self._boots:
                data["up"] = str(time.time() + self._boots)
            lease = known.get(order.key) or Lease("loopback", file_name(order.key), order.key, data)
            if order.key not in known:
                self._note("created", lease, "order")
            (self._root / lease.data["host"]).mkdir(exist_ok=True)
            state = "kept" if order.keep else ""
            self._write(_Rented(lease, order.until.timestamp(), state))
        filled = self._faulty.count("filled", self._faults.unsure + self._faults.garbled)
        if filled <= self._faults.unsure:
            raise Unsure(f"the reply to the order of {name} was lost")
        if filled <= self._faults.unsure + self._faults.garbled:
            json.loads("<html>502 Bad Gateway</html>")
        return lease

    async def hosts(self, lease: Lease) -> Sequence[LoopbackHost] | None:
        self._faulty.count_request()
        with self._alone():
            found = self._there(lease)
        if found.state == "stopped":
            raise HostLost(f"the machine {lease.data['host']} was stopped")
        if self._faulty.count(f"coming.{lease.id}", self._faults.coming) <= self._faults.coming:
            return None
        if float(lease.data.get("up", 0.0)) > time.time():
            return None
        if self._faulty.count("polls", self._faults.lost_on_poll) == self._faults.lost_on_poll:
            self._lose(lease)
            raise HostLost(f"{lease.data['host']} is gone")
        if lease.id not in self._made:
            address = self._addresses.get(lease.data["host"], "127.0.0.1")
            root = str(self._root / lease.data["host"] / ROOT)
            self._made[lease.id] = LoopbackHost(
                partial(self._carry, lease), root, self._agent_python, address
            )
        return (self._made[lease.id],)

    async def release(self, lease: Lease) -> bool:
        self._faulty.count_request()
        if self._faulty.count("released", self._faults.kept) <= self._faults.kept:
            return False
        with self._alone():
            self._end(lease, "release")
        self._made.pop(lease.id, None)
        return True

    async def start(self, lease: Lease, until: datetime) -> None:
        """Start a stopped machine."""
        self._faulty.count_request()
        self._faulty.refuse()
        with self._alone():
            found = self._there(lease)
            self._write(found._replace(until=until.timestamp(), state="kept"))
            if found.state == "stopped":
                self._note("started", lease, "order")

    async def stop(self, lease: Lease) -> bool:
        """Stop a machine: its processes end, and its disk stays."""
        self._faulty.count_request()
        if self._faulty.count("released", self._faults.kept) <= self._faults.kept:
            return False
        with self._alone():
            found = self._find_rented(lease)
            if found is not None:
                self._stop(found, "release")
        self._made.pop(lease.id, None)
        return True

    async def stands(self, lease: Lease) -> Literal["runs", "stopped", "gone"]:
        self._faulty.count_request()
        with self._alone():
            self._expire()
            found = self._find_rented(lease)
        if found is None:
            return "gone"
        return "stopped" if found.state == "stopped" else "runs"

    async def leases(self) -> Sequence[Lease]:
        self._faulty.count_request()
        with self._alone():
            self._expire()
        found = self._leases()
        if self._faulty.count("listings", self._faults.unlisted) <= self._faults.unlisted:
            found.sort(key=lambda lease: (self._root / "leases" / lease.id).stat().st_mtime_ns)
            found = found[:-1]
        return found

    async def visit(self) -> AsyncIterator[tuple[str, LoopbackHost]]:
        """Yield every machine without taking a slot."""
        for name in self._names:
            home = self._root / name
            with _translate_errors():
                home.mkdir(parents=True, exist_ok=True)
            address = self._addresses.get(name, "127.0.0.1")
            host = LoopbackHost(partial(_look, home), str(home / ROOT), self._agent_python, address)
            yield name, host

    def _leases(self) -> list[Lease]:
        """Return the unexpired leases. Leases of a killed worker are included."""
        found: list[Lease] = []
        for each in self._list_rented():
            if each.until > time.time() or each.state:
                found.append(each.lease)
        return found

    def _list_rented(self) -> list[_Rented]:
        with _translate_errors():
            files = sorted((self._root / "leases").glob("[!.]*"))
            paths = [path for path in files if path.name != "lock"]
            told = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return [
            _Rented(Lease("loopback", name, key, data), until, state)
            for name, key, data, until, state in told
        ]

    def _find_rented(self, lease: Lease) -> _Rented | None:
        return next((each for each in self._list_rented() if each.lease.id == lease.id), None)

    def _there(self, lease: Lease) -> _Rented:
        """Return the slot of a lease, after expiring old slots. Raises HostLost."""
        self._expire()
        found = self._find_rented(lease)
        if found is None:
            raise HostLost(
                f'the lease "{lease.key}" of {lease.data["host"]} was given back, or its host is gone'
            )
        return found

    def _runs(self, lease: Lease) -> bool:
        try:
            return bool(
                json.loads((self._root / "leases" / lease.id).read_text("utf-8"))[-1] != "stopped"
            )
        except FileNotFoundError:
            return False

    def _write(self, rented: _Rented) -> None:
        lease, new = rented.lease, self._root / "leases" / f".{rented.lease.id}"
        new.write_text(
            json.dumps([lease.id, lease.key, dict(lease.data), rented.until, rented.state]),
            encoding="utf-8",
        )
        new.rename(self._root / "leases" / lease.id)

    def _expire(self) -> None:
        """End expired slots as a provider does.

        Machines with a price are destroyed or stopped. Slots without a price only stop counting.
        """
        if not self._price:
            return
        for each in self._list_rented():
            if each.until <= time.time():
                if each.state:
                    self._stop(each, "provider")
                else:
                    self._end(each.lease, "provider")

    def _stop(self, rented: _Rented, by: str) -> None:
        """End all processes of a machine, and keep its disk."""
        if rented.state != "stopped":
            _end_all(self._root / rented.lease.data["host"])
            self._write(rented._replace(state="stopped"))
            self._note("stopped", rented.lease, by)

    def _end(self, lease: Lease, by: str) -> None:
        """Free a slot. With a price, also destroy its machine and end all processes there."""
        path = self._root / "leases" / lease.id
        if self._price and path.exists():
            _end_all(self._root / lease.data["host"])
            shutil.rmtree(self._root / lease.data["host"], ignore_errors=True)
            self._note("destroyed", lease, by)
        path.unlink(missing_ok=True)

    def _note(self, what: str, lease: Lease, by: str) -> None:
        if self._price:
            line = {
                "at": time.time(),
                "what": what,
                "key": lease.key,
                "host": lease.data["host"],
                "rate": self._price,
                "by": by,
            }
            with (self._root / "provider.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock on slots, so that no other process changes them."""
        with _translate_errors():
            (self._root / "leases").mkdir(parents=True, exist_ok=True)
            with (self._root / "leases" / "lock").open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def _lose(self, lease: Lease) -> None:
        """Simulate the loss of a lease's machine: end its processes and all its leases."""
        home = self._root / lease.data["host"]
        with self._alone():  # it is not leased again before all of it is gone
            for other in self._leases():
                if other.data["host"] == home.name:
                    self._note("destroyed", other, "fault")
                    (self._root / "leases" / other.id).unlink()
            _end_all(home)
            if not self._faults.keeps_disk:
                shutil.rmtree(home, ignore_errors=True)

    async def _carry(
        self, lease: Lease, argv: Argv, stdin: AsyncIterable[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Run a program on the machine of a lease, with injected faults."""
        home = self._root / lease.data["host"]
        if not self._runs(lease):
            raise HostLost(
                f"{home.name} no longer exists or was stopped, or its lease was released"
            )
        passage = self._strike(lease)
        sent = stdin if stdin is NOTHING else self._send_input(stdin, passage)
        try:
            async with aclosing(calls.call(argv, sent, _environment(home), home)) as stream:
                async for data in stream:
                    passed, cut = await passage.let(data)
                    if passed:
                        yield passed
                    if cut:
                        raise cut
        except Rejected:
            if not self._runs(lease):
                raise HostLost(f"{home.name} went away meanwhile") from None
            raise

    def _strike(self, lease: Lease) -> _Passage:
        """Count a call, and return the passage for its data with the fault of this call.

        Raises HostLost or Unreachable if that is the fault.
        """
        faults, name = self._faults, lease.data["host"]
        now = self._faulty.count(
            "calls", max(faults.lost_on_call, faults.unreachable_on_call, faults.cut_on_call)
        )
        if now == faults.lost_on_call:
            self._lose(lease)
            raise HostLost(f"{name} is gone")
        if now >= faults.unreachable_on_call:
            is_back = now >= faults.unreachable_on_call + faults.unreachable
            if not is_back or self._faulty.dark(name):
                raise Unreachable(f"{name} does not answer")
        cut_after = faults.cut_after if now == faults.cut_on_call else None
        return _Passage(faults.bytes_per_second, cut_after)

    async def _send_input(
        self, stdin: AsyncIterable[bytes], passage: _Passage
    ) -> AsyncIterator[bytes]:
        async for data in stdin:
            passed, cut = await passage.let(data)
            over = (
                self._faulty.count("sent", self._faults.disk, len(passed)) - self._faults.disk
                if self._faults.disk
                else 0
            )
            if over > 0:
                passed, cut = passed[:-over], Denied("write error: No space left on device")
            if passed:
                yield passed
            if cut:
                raise cut


class LoopbackHost(Host):
    """A simulated machine: a directory in which programs run."""

    def __init__(
        self,
        call: Callable[[Argv, AsyncIterable[bytes]], AsyncIterator[bytes]],
        root: str,
        python: str,
        address: str,
    ) -> None:
        self.root, self.python, self.address = root, python, address
        self._call = call

    def call(self, argv: Argv, stdin: AsyncIterable[bytes] = NOTHING) -> AsyncIterator[bytes]:
        return self._call(argv, stdin)


class _Passage:
    """Limiter of the bytes that a faulty connection transfers."""

    def __init__(self, rate: int, left: int | None) -> None:
        self._rate, self._left = rate, left

    async def let(self, data: bytes) -> tuple[bytes, Exception | None]:
        """Return the part of `data` that is transferred, and the error to raise afterwards."""
        cut = None
        if self._left is not None:
            data, self._left = data[: self._left], self._left - len(data)
            cut = Unreachable("connection lost") if self._left <= 0 else None
        if self._rate:
            await asyncio.sleep(len(data) / self._rate)
        return data, cut


def _look(home: Path, argv: Argv, stdin: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    return calls.call(argv, stdin, _environment(home), home)


def _environment(home: Path) -> dict[str, str]:
    return {"PATH": os.defpath, "HOME": str(home)}


def _end_all(home: Path) -> None:
    """Kill all processes that were started on a simulated machine through `call`, or run in it."""
    marks = [f"\0HOME={home}\0".encode()]
    agent = f"\0{home / ROOT / 'agent'}\0".encode()
    with suppress(FileNotFoundError):
        root = (home / ROOT / "agent").stat()
        marks.append(f"@{root.st_dev}-{root.st_ino}\0".encode())  # in the environment of its jobs
    while True:
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                if _runs_on(home, entry, marks) or agent in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        if not found:
            return
        # Stop all first, so that the agent does not see its jobs end.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        time.sleep(0.01)


def _runs_on(home: Path, process: Path, marks: Sequence[bytes]) -> bool:
    """Return True if a process in /proc works below `home` or has a mark in its environment.

    Raises OSError if the process has ended or belongs to another user.
    """
    at = os.readlink(process / "cwd").removesuffix(" (deleted)")
    environ = b"\0" + (process / "environ").read_bytes() + b"\0"
    if at == str(home) or at.startswith(f"{home}/"):
        return True
    return any(mark in environ for mark in marks)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Denied(f"{error.filename}: {error.strerror or error}") from error
