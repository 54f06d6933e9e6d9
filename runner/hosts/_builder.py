"""Make a Python environment from requirements that are pinned by hash.  A program by itself, for the host; knows pip's words, not who asked.

    python -I builder.py HOME REQUIREMENTS

One at a time works on a HOME, by a lock in it: a builder whose asker was killed goes on undisturbed, and the next one finds what it made.  What a
builder left that was killed itself is cleared away.  Wheels are downloaded below HOME: a /tmp is often memory, and too small.

Lines of JSON say how it goes: {"says": how far it is}, and at last {"done": …} or {"wrong": one sentence, "fix": what to do}.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

PULSE, SLOWEST = 10.0, 60.0
"""Seconds between words about how far it is: at first, and when it takes long."""
OLDEST_PIP = (22, 3)
"""The first pip that can work on another environment than its own."""
ELSEWHERE = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PIP_QUIET")
"""Variables of the caller that say where pip installs to, or what else: here both are settled.  Where it takes files from is the caller's to say."""
TRIES = 3
"""Times that pip begins when connections break; what is in its cache by then is not fetched again."""
QUIETLY = ("--disable-pip-version-check", "--no-input")
LONGEST = 1000
"""Characters of a reason."""
LAST = 400
"""Lines that are kept of what pip says from its first fault on."""


class Wrong(Exception):
    """Why there is no environment, and what to do."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


class Broken(Wrong):
    """The index does not answer, or not to the end."""


class Pip:
    """What a pip at work has printed, as far as it matters."""

    def __init__(self, wanted: int, meant: str) -> None:
        self.meant = meant
        self.wanted, self.here, self.size = wanted, 0, 0.0
        self.installing = False
        self.index, self.broken = "pypi.org", False
        self.faults: list[str] = []

    def reads(self, line: str) -> None:
        if line.startswith("Ignoring "):
            self.wanted -= 1
        elif got := re.match(r"\s*(?:Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+) ([kMG]?)B\))?", line):
            if not got[1].endswith(".metadata"):
                self.here += 1
                self.size += float(got[2] or 0) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[got[3] or ""]
        elif line.startswith("Installing collected packages:"):
            self.installing = True
            self.wanted = line.count(",") + 1
        elif line.startswith("Looking in indexes: "):
            self.index = line[20:].strip()
        elif "connection broken by" in line:
            self.broken = True
        if "ERROR" in line or self.faults:
            self.faults = [*self.faults, line.strip()][:LAST]

    def fault(self) -> Exception:
        """Why it failed: Wrong, Broken, or OSError when the disk is full."""
        said = "\n".join(self.faults)
        if any(word in said for word in ("No space left", f"[Errno {errno.ENOSPC}]", f"[Errno {errno.EDQUOT}]")):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "DO NOT MATCH THE HASHES" in said:
            return Wrong(_mismatch(self.faults), "take the lock again from where it came, or make it again if another file is meant")
        missing = re.search(r"No matching distribution found for ([^\s;]+)", said)
        if re.search(r"Max retries|timed out|ProtocolError|IncompleteRead|ConnectionReset", said) or (missing and self.broken):
            return Broken(f"the package index ({self.index}) does not answer", "look at the network and at `pip config list`, and run again")
        if missing:
            python = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {os.uname().machine}"
            meant = f"; the lock is for {self.meant}" if self.meant else ""
            fix = "run with a Python that the lock is for, or with --python current in packages of your own"
            return Wrong(f"the package index has no {missing[1]} for {python}{meant}", fix)
        errors = [line.partition("ERROR:")[2].strip() or line for line in self.faults if "ERROR" in line]
        return Wrong(" ".join(errors) or "pip failed and did not say why", "correct the lock, or use --python current")


def build(home: str, requirements: str) -> None:
    """Make the environment, unless it is there.  Raises Wrong, OSError."""
    os.makedirs(home, exist_ok=True)
    with _held(f"{home}/lock") as lock:
        if os.path.exists(f"{home}/complete") and os.path.exists(f"{home}/bin/python"):
            return
        _clear(home)
        began = time.monotonic()
        try:
            wanted = _made(home, requirements, lock)
        except (Wrong, OSError):
            with contextlib.suppress(OSError):
                _clear(home)  # half of one is of no use, and may be why the disk is full
            raise
        os.sync()  # a power cut must not leave a `complete` beside files without content
        with open(f"{home}/complete", "w") as file:
            file.write("done\n")
        _say(done={"packages": wanted, "seconds": round(time.monotonic() - began, 1), "bytes": _size(home)})


def _made(home: str, requirements: str, lock: int) -> int:
    import venv  # not for who only waited

    # A pip of this Python's own works on the environment from outside: giving it one of its own takes seconds.
    ours = _pip() >= OLDEST_PIP
    venv.EnvBuilder(symlinks=True).create(home)
    python = f"{home}/bin/python"
    if not ours and subprocess.run([python, "-m", "ensurepip"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
        raise Wrong(
            f"{sys.executable} has neither pip nor ensurepip", "install python3-venv there, or name another `python` in the driver's settings"
        )
    argv = [sys.executable, "-I", "-m", "pip", "--python", python] if ours else [python, "-m", "pip"]
    left = TRIES
    while True:
        left -= 1
        try:
            return _installed(argv, home, requirements, lock)
        except Broken as error:
            if not left:
                raise
            _say(says=f"{error}; trying again")


def _installed(pip: Sequence[str], home: str, requirements: str, lock: int) -> int:
    with open(requirements, encoding="utf-8") as file:
        lines = file.read().splitlines()
    # Our own locks begin with what they are for.
    head = re.match(r"# Made by .*?: (.*?)\.?$", lines[0]) if lines else None
    heard = Pip(sum(1 for line in lines if re.match(r"[A-Za-z0-9]", line)), head[1] if head else "")
    os.makedirs(f"{home}/fetched", exist_ok=True)
    # A lock names all there is: nothing is to be looked for beside it, and no extra, which pip could not match with its pin.
    argv = [*pip, "install", *QUIETLY, "--progress-bar", "off", "--require-hashes", "--no-deps", "-r", requirements]
    over = threading.Event()
    # It holds the lock too: nobody else begins while a pip is at work whose builder was killed.
    with subprocess.Popen(
        argv, env=_env(home), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", pass_fds=(lock,)
    ) as process:
        assert process.stdout is not None
        teller = threading.Thread(target=_tell, args=(home, heard, over))
        teller.start()
        for line in process.stdout:
            heard.reads(line)
        over.set()
        teller.join()
    if process.returncode:
        raise heard.fault()
    _complete(pip, home)
    shutil.rmtree(f"{home}/fetched", ignore_errors=True)
    return heard.wanted


def _complete(pip: Sequence[str], home: str) -> None:
    """Raises Wrong when a package misses one that it needs.  pip looked for none: a lock names all, and what it says about versions holds."""
    told = subprocess.run([*pip, "check", *QUIETLY], env=_env(home), capture_output=True, text=True, errors="replace").stdout
    missing = re.findall(r"^(\S+) (\S+) requires (\S+), which is not installed", told, re.M)
    if missing:
        said = "; nor ".join(f"{needed}, which {package} {version} needs" for package, version, needed in missing)
        raise Wrong(f"the lock does not pin {said}", "make the lock again: it has to hold all that its packages need")


def _env(home: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ELSEWHERE} | {"TMPDIR": f"{home}/fetched", "PYTHONUNBUFFERED": "1"}


def _tell(home: str, heard: Pip, over: threading.Event) -> None:
    last, pause = "", PULSE
    while not over.wait(pause):
        pause = min(SLOWEST, pause * 1.3)
        if heard.installing:
            words = f"{_there(home)} of {heard.wanted} packages installed"
        else:
            words = f"{min(heard.here, heard.wanted)} of {heard.wanted} packages fetched, {heard.size / 1e9:.1f} GB"
        if words != last:
            _say(says=words)
        last = words


def _there(home: str) -> int:
    with contextlib.suppress(OSError):
        return sum(name.endswith(".dist-info") for name in os.listdir(f"{home}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"))
    return 0


def _mismatch(said: Sequence[str]) -> str:
    """pip's report of files that are not those of the lock, as one sentence."""
    package = next((line.rstrip(":") for line in said if re.match(r"[\w.-]+==\S+ from |\S+://|[\w.-]+==", line)), "a package")
    expected = re.search(r"Expected sha\d+ ([0-9a-f]{12})", "\n".join(said))
    got = re.search(r"Got\s+([0-9a-f]{12})", "\n".join(said))
    package = re.sub(r" \(from -r .*", "", package)
    return f"{package} has HASHES that the lock does not pin (wanted {expected[1] if expected else '?'}…, got {got[1] if got else '?'}…)"


def _pip() -> tuple[int, ...]:
    from importlib import metadata

    try:
        return tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        return ()


@contextlib.contextmanager
def _held(path: str) -> Iterator[int]:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(says="another run is installing them; this one waits")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _clear(home: str) -> None:
    for item in list(os.scandir(home)):
        if item.name != "lock":
            shutil.rmtree(item.path) if item.is_dir(follow_symlinks=False) else os.unlink(item.path)


def _size(home: str) -> int:
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(home) for name in names)


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def main(home: str, requirements: str) -> int:
    try:
        build(home, requirements)
    except Wrong as error:
        _say(wrong=str(error)[:LONGEST], fix=error.fix)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(home).free / 1e9
            fix = "make room there, or have it on another disk: RECIPE_HOME here, `root` in the settings of a driver"
            _say(wrong=f"the disk of {home} is full: {free:.1f} GB are free without it", fix=fix)
        else:
            _say(wrong=str(error)[:LONGEST], fix="see to that, and run again")
    else:
        return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
