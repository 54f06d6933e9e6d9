"""Create a Python environment from requirements pinned by hash.

This program runs alone on a host and imports nothing of recipe.

python -I builder.py HOME REQUIREMENTS [UV]

If REQUIREMENTS is empty, the environment has no packages of its own and sees the packages of the
base Python.  If UV is given and runs on this host, uv installs the packages by hard links from the
user's uv cache.  Otherwise pip installs them.  A lock file in HOME allows one builder at a time. A
builder whose caller was killed continues, and the next builder finds its environment.  Files of a
killed builder are deleted. Downloads never go to /tmp, which is often memory and too small: uv has
its cache, pip a directory below HOME.

The output is JSON lines: {"says": progress}, and as the last line {"done": ...} or {"wrong": one
sentence, "fix": the remedy}.
"""

from __future__ import annotations

import configparser
import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

PULSE, SLOWEST = 10.0, 60.0
"""Seconds between two progress messages: the first pause and the longest pause."""
OLDEST_PIP = (22, 3)
"""Oldest pip with the option `--python`."""
ELSEWHERE = (
    *(
        "PYTHONPATH",
        "PYTHONHOME",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_ROOT",
        "PIP_USER",
        "PIP_CONSTRAINT",
        "PIP_REQUIREMENT",
        "PIP_QUIET",
    ),
    *(
        "VIRTUAL_ENV",
        "UV_PYTHON",
        "UV_SYSTEM_PYTHON",
        "UV_PROJECT",
        "UV_WORKING_DIR",
        "UV_CONSTRAINT",
        "UV_OVERRIDE",
        "UV_EXCLUDE",
    ),
    *("UV_EXCLUDE_NEWER", "UV_TARGET", "UV_PREFIX", "UV_NO_VERIFY_HASHES", "UV_TORCH_BACKEND"),
)
"""Environment variables that change the install target or the package selection.

The installer does not inherit them.
"""
OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
}
"""pip settings about package sources -> environment variables of uv.

uv does not read pip's settings.
"""
INDEXES_OF_UV = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL")
"""Environment variables of uv that set a package index."""
INDEXES_OF_PIP = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
"""Environment variables of pip that set a package index."""
TRIES = 3
"""Attempts of an installer when connections break.  Files in its cache are not downloaded again."""
QUIETLY = ("--disable-pip-version-check", "--no-input")
LONGEST = 1000
"""Longest error message, in characters."""
LAST = 400
"""Lines of installer output kept after the first error."""
FULL = (
    "No space left",
    "Disk quota exceeded",
    f"[Errno {errno.ENOSPC}]",
    f"[Errno {errno.EDQUOT}]",
)
ANOTHER_LOCK = "correct the lock file, or pass `--python current`"


class BuildError(Exception):
    """An environment that cannot be created; `fix` is the remedy."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


class IndexUnreachable(BuildError):
    """The connection to the package index failed."""


class MissingFile(BuildError):
    """The package index has no matching file."""


class Pip:
    """A pip run: its command, and the progress and errors parsed from its output."""

    def __init__(self, command: Sequence[str], home: str, wanted: int, meant: str) -> None:
        self.command, self.env, self.meant = command, _installer_env(home), meant
        self.wanted, self.finished, self.size = wanted, 0, 0.0
        self.installing = False
        self.index, self.broken = "pypi.org", False
        self.faults: list[str] = []

    def argv(self, requirements: str) -> list[str]:
        # The lock names all packages, so no dependencies and extras are resolved: pip could not
        # match an extra with its pin.
        return [
            *self.command,
            "install",
            *QUIETLY,
            "--progress-bar",
            "off",
            "--require-hashes",
            "--no-deps",
            "-r",
            requirements,
        ]

    def parse_line(self, line: str) -> None:
        """Update the progress and the errors from a line of pip's output."""
        if line.startswith("Ignoring "):
            self.wanted -= 1
        elif got := re.match(
            r"\s*(?:Downloading|Using cached|Processing) (\S+)(?: \(([\d.]+) ([kMG]?)B\))?", line
        ):
            if not got[1].endswith(".metadata"):
                self.finished += 1
                unit = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[got[3] or ""]
                self.size += float(got[2] or 0) * unit
        elif line.startswith("Installing collected packages:"):
            self.installing = True
            self.wanted = line.count(",") + 1
        elif line.startswith("Looking in indexes: "):
            self.index = line[20:].strip()
        elif "connection broken by" in line:
            self.broken = True
        if "ERROR" in line or self.faults:
            self.faults = [*self.faults, line.strip()][:LAST]

    def download_progress(self) -> str:
        return f"{min(self.finished, self.wanted)} of {self.wanted} packages downloaded, {self.size / 1e9:.1f} GB"

    def find_error(self) -> Exception:
        """Return the cause of the failure: BuildError, Broken, or OSError if the disk is full."""
        output = "\n".join(self.faults)
        if any(word in output for word in FULL):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "DO NOT MATCH THE HASHES" in output:
            return _hash_error(
                self._find_wrong_package(),
                r"Expected sha\d+ ([0-9a-f]{12})",
                r"Got\s+([0-9a-f]{12})",
                output,
            )
        missing = re.search(r"No matching distribution found for ([^\s;]+)", output)
        lost_connection = re.search(
            r"Max retries|timed out|ProtocolError|IncompleteRead|ConnectionReset", output
        )
        # pip reports an index that it cannot reach as one without the package, after its warnings.
        if lost_connection or (missing and self.broken):
            return IndexUnreachable(
                f"cannot reach the package index ({self.index})",
                _index_fix(INDEXES_OF_PIP, "pip.conf"),
            )
        if missing:
            return missing_package(missing[1], self.meant)
        lines = [line for line in self.faults if "ERROR" in line]
        errors = [line.partition("ERROR:")[2].strip() or line for line in lines]
        return BuildError(" ".join(errors) or "pip failed without an error message", ANOTHER_LOCK)

    def _find_wrong_package(self) -> str:
        """Return the package that pip names in its error about hashes."""
        for line in self.faults:
            if re.match(r"[\w.-]+==\S+ from |\S+://|[\w.-]+==", line):
                return re.sub(r" \(from -r .*", "", line.rstrip(":"))
        return "a package"

    def find_unpinned(self) -> list[str]:
        """Return the dependencies that the lock does not pin, each with the package that needs it."""
        output = subprocess.run(
            [*self.command, "check", *QUIETLY],
            env=self.env,
            capture_output=True,
            text=True,
            errors="replace",
        ).stdout
        missing = re.findall(r"^(\S+) \S+ requires (\S+), which is not installed", output, re.M)
        return [f"{needed}, which {package} needs" for package, needed in missing]


class Uv:
    """A uv run: its command, and its progress and errors.

    They are parsed from the output, which reports downloads of large files only.
    """

    def __init__(self, program: str, home: str, wanted: int, meant: str) -> None:
        self.program, self.python, self.meant = program, f"{home}/bin/python", meant
        self.env = _uv_env(home)
        self.wanted, self.installing = wanted, False
        self.large: dict[str, float] = {}
        self.finished: list[str] = []
        self.faults: list[str] = []

    def argv(self, requirements: str) -> list[str]:
        # All indexes have equal priority, as for pip: the hashes pin the files.
        options = ["--require-hashes", "--no-deps", "--index-strategy", "unsafe-best-match"]
        options += no_index_option(os.environ)
        return [
            self.program,
            "pip",
            "install",
            "--python",
            self.python,
            *options,
            "-r",
            requirements,
        ]

    def parse_line(self, line: str) -> None:
        """Update the progress and the errors from a line of uv's output."""
        if got := re.match(r"(Resolved|Prepared) (\d+) package", line):
            if got[1] == "Resolved":
                self.wanted = int(got[2])
            self.installing = got[1] == "Prepared"
        elif got := re.match(r"Downloading (\S+) \(([\d.]+)([KMG]?)i?B\)", line):
            self.large[got[1]] = float(got[2]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[got[3]]
        elif got := re.match(r" Downloaded (\S+)", line):
            self.finished.append(got[1])
        elif line.startswith("error:") or self.faults:
            self.faults = [*self.faults, line.strip()][:LAST]

    def download_progress(self) -> str:
        size = sum(self.large.get(name, 0.0) for name in self.finished)
        total = sum(self.large.values())
        return f"{len(self.finished)} of {len(self.large)} large packages downloaded, {size / 1e9:.1f} of {total / 1e9:.1f} GB"

    def find_error(self) -> Exception:
        """Return the cause of the failure: BuildError, Broken, or OSError if a disk is full."""
        output = "\n".join(self.faults)
        if any(word in output for word in FULL):
            named = re.search(
                r"(?: to | file |[`'])(/[^`:'\n]+)[`']?: (?:No space|Disk quota)", output
            )
            path = named[1] if named else None
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if got := re.search(r"Hash mismatch for `([^`]+)`", output):
            return _hash_error(
                got[1],
                r"Expected:\s+sha\d+:([0-9a-f]{12})",
                r"Computed:\s+sha\d+:([0-9a-f]{12})",
                output,
            )
        url = (re.search(r"(https?://[^\s)`]+)", output) or ["from uv's settings"])[0]
        if got := re.search(r"HTTP status client error \((\d+ [^)]*)\)", output):
            return BuildError(
                f"the package index ({url}) rejected the request: {got[1]}",
                "check its URL and password in the settings of uv or pip",
            )
        if re.search(
            r"error sending request|Failed to fetch|HTTP status server|timed out|[Cc]onnection|error decoding response",
            output,
        ):
            return IndexUnreachable(
                f"cannot reach the package index ({url})",
                _index_fix((*INDEXES_OF_UV, *INDEXES_OF_PIP), "~/.config/uv/uv.toml or pip.conf"),
            )
        if got := re.search(r"In `--require-hashes` mode, .*(?:found|for): ([^\n]+)", output):
            return BuildError(
                f"{got[1].strip()} is not pinned by version and hash",
                "lock the file with `recipe lock`",
            )
        if got := re.search(r"you\s+require\s+([\w.\[\],-]+==[^\s,;]+)", output):
            return missing_package(got[1], self.meant)
        lines = [re.sub(r"^(error|cause): ", "", line).rstrip(".") for line in self.faults if line]
        return BuildError("; ".join(lines) or "uv failed without an error message", ANOTHER_LOCK)

    def find_unpinned(self) -> list[str]:
        """Return the dependencies that the lock does not pin, each with the package that needs it."""
        argv = [self.program, "pip", "check", "--python", self.python]
        output = subprocess.run(
            argv, env=self.env, capture_output=True, text=True, errors="replace"
        )
        missing = re.findall(
            r"The package `([^`]+)` requires `([\w.-]+)[^`]*`, but it's not installed",
            output.stdout + output.stderr,
        )
        return [f"{needed}, which {package} needs" for package, needed in missing]


def build(home: str, requirements: str, uv: str) -> None:
    """Create the environment if it does not exist.  Raises BuildError, OSError."""
    os.makedirs(home, exist_ok=True)
    with hold_lock(f"{home}/lock") as lock:
        if os.path.exists(f"{home}/complete") and os.path.exists(f"{home}/bin/python"):
            return
        _clear(home)
        began = time.monotonic()
        try:
            wanted = make_environment(home, requirements, uv, lock)
        except (BuildError, OSError):
            # A partial environment is useless, and may be the reason why the disk is full.
            with contextlib.suppress(OSError):
                _clear(home)
            raise
        os.sync()  # after a power cut, `complete` must not exist beside empty files, here or in a cache
        with open(f"{home}/complete", "w") as file:
            file.write("done\n")
        _say(
            done={
                "packages": wanted,
                "seconds": round(time.monotonic() - began, 1),
                "bytes": _disk_usage(home),
            }
        )


def make_environment(home: str, requirements: str, uv: str, lock: int) -> int:
    """Create the environment and install its packages.  Returns the number of packages."""
    import venv  # slow import, unnecessary for a builder that only waited

    if not requirements:
        venv.EnvBuilder(symlinks=True, system_site_packages=True).create(home)
        return 0
    venv.EnvBuilder(symlinks=True).create(home)
    os.makedirs(f"{home}/fetched", exist_ok=True)
    with open(requirements, encoding="utf-8") as file:
        lines = file.read().splitlines()
    # The first line of our own locks names their target.
    head = re.match(r"# Made by .*?: (.*?)\.?$", lines[0]) if lines else None
    meant = head[1] if head else ""
    # Other lines are comments, options and hashes.
    wanted = len([line for line in lines if re.match(r"[A-Za-z0-9]", line)])
    if not _can_run(uv):
        pip = _find_pip(home)
        return install_insistently(lambda: Pip(pip, home, wanted, meant), home, requirements, lock)
    with open(f"{home}/fetched/exact.txt", "w", encoding="utf-8") as file:
        file.writelines(f"{_pin_exactly(line)}\n" for line in lines)
    try:
        return install_insistently(lambda: Uv(uv, home, wanted, meant), home, file.name, lock)
    except MissingFile:
        return install_insistently(lambda: Uv(uv, home, wanted, meant), home, requirements, lock)


def _pin_exactly(line: str) -> str:
    """Change a pin from `==` to `===`.

    Otherwise uv may choose a build with a local version such as 2.13.0+cpu.  pip selects by hash.
    """
    return re.sub(
        r"^([A-Za-z0-9][\w.-]*(?:\[[^\]]*\])?) *== *([^\s;*+=]+)(?=[\s;\\]|$)", r"\1===\2", line
    )


def install_insistently(
    installer: Callable[[], Pip | Uv], home: str, requirements: str, lock: int
) -> int:
    """Install the packages, with a new attempt after a broken connection.

    Returns the number of packages.
    """
    for left in range(TRIES - 1, -1, -1):
        try:
            return install(installer(), home, requirements, lock)
        except IndexUnreachable as error:
            if not left:
                raise
            _say(says=f"{error}; trying again")
    raise AssertionError("unreachable")


def _can_run(uv: str) -> bool:
    """Return whether the program `uv` runs on this host.  A uv for another C library does not."""
    if not uv:
        return False
    try:
        asked = subprocess.run(
            [uv, "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    except OSError:
        return False
    return asked.returncode == 0


def _find_pip(home: str) -> list[str]:
    """Return the command of a pip that can install into the environment.

    The pip of this Python saves seconds.  Raises BuildError.
    """
    from importlib import metadata

    python = f"{home}/bin/python"
    with contextlib.suppress(metadata.PackageNotFoundError):
        numbers = re.findall(r"\d+", metadata.version("pip"))[:2]
        if tuple(map(int, numbers)) >= OLDEST_PIP:
            return [sys.executable, "-I", "-m", "pip", "--python", python]
    ensured = subprocess.run(
        [python, "-m", "ensurepip"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if ensured.returncode:
        raise BuildError(
            f"{sys.executable} has neither pip nor ensurepip",
            "install python3-venv on the host, or set another `python` in the driver's settings",
        )
    return [python, "-m", "pip"]


def install(installer: Pip | Uv, home: str, requirements: str, lock: int) -> int:
    """Run an installer and report its progress.

    Returns the number of packages.  Raises BuildError, OSError.
    """
    over = threading.Event()
    # The installer inherits the lock: after a kill of its builder, no other builder starts while it
    # works.
    with subprocess.Popen(
        installer.argv(requirements),
        env=installer.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    ) as process:
        assert process.stdout is not None
        teller = threading.Thread(target=_report_progress, args=(home, installer, over))
        teller.start()
        for line in process.stdout:
            installer.parse_line(line)
        over.set()
        teller.join()
    if process.returncode:
        raise installer.find_error()
    # Only the packages of the lock were installed, so the version check reports what the lock
    # forgot.
    unpinned = installer.find_unpinned()
    if unpinned:
        raise BuildError(
            f"the lock does not pin {'; nor '.join(unpinned)}",
            "create the lock file again with all dependencies",
        )
    shutil.rmtree(f"{home}/fetched", ignore_errors=True)
    return installer.wanted


def _installer_env(home: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    env["TMPDIR"] = f"{home}/fetched"
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _uv_env(home: str) -> dict[str, str]:
    """Return the environment of uv.

    pip's settings about package sources apply if uv has no setting of its own.
    """
    env = {
        "NO_COLOR": "1",
        **translate_pip_settings(os.environ),
        **_installer_env(home),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    caches = env.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not _is_writable(env.get("UV_CACHE_DIR") or f"{caches}/uv"):
        env["UV_CACHE_DIR"] = f"{home}/fetched"
    return env


def _is_writable(folder: str) -> bool:
    """Create a directory if it is missing; return whether files can be written there."""
    try:
        os.makedirs(folder, exist_ok=True)
        return os.access(folder, os.W_OK)
    except OSError:
        return False


def translate_pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's settings (files and variables) to uv's variables.

    Local paths that do not exist are left out, as pip does.
    """
    settings = _read_pip_settings(environ)
    variables = {}
    for name, variable in OF_PIP.items():
        values = [value for value in settings.get(name, "").split() if _is_there(value)]
        if values:
            separator = "," if variable == "UV_FIND_LINKS" else " "
            variables[variable] = separator.join(values)
    if environ.get("UV_INDEX_URL"):  # the deprecated name, over which UV_DEFAULT_INDEX would win
        variables.pop("UV_DEFAULT_INDEX", None)
    return variables


def no_index_option(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Translate pip's `no-index` to uv's option, for which uv has no variable.

    Empty if uv has an index of its own in `environ`.
    """
    if any(environ.get(name) for name in INDEXES_OF_UV):
        return ()
    value = _read_pip_settings(environ).get("no-index", "").lower()
    return ("--no-index",) if value in ("1", "true", "yes", "on", "t", "y") else ()


def _read_pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Read pip's settings from its files and variables."""
    read = configparser.RawConfigParser(strict=False)
    user = os.path.expanduser("~")
    config = environ.get("XDG_CONFIG_HOME") or f"{user}/.config"
    files = (
        "/etc/xdg/pip/pip.conf",
        "/etc/pip.conf",
        f"{user}/.pip/pip.conf",
        f"{config}/pip/pip.conf",
        f"{sys.prefix}/pip.conf",
    )
    named = environ.get("PIP_CONFIG_FILE", "")
    # To pip, the null device means that no file is read.
    paths = () if named == os.devnull else (*files, named)
    for path in paths:
        with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
            read.read(path)
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        if read.has_section(section):
            settings.update(read.items(section))
    for name, value in environ.items():
        if name.startswith("PIP_"):
            settings[name[len("PIP_") :].lower().replace("_", "-")] = value
    return settings


def _is_there(place: str) -> bool:
    path = place.removeprefix("file://")
    return not path.startswith("/") or os.path.exists(path)


def _index_fix(variables: Sequence[str], files: str) -> str:
    """Return the remedy for an unreachable index.

    It names only settings that reach this installer.
    """
    place = ", ".join(filter(os.environ.get, variables)) or f"{files} of the machine"
    return f"check the network and the package index in {place}, then run again"


def _report_progress(home: str, installer: Pip | Uv, over: threading.Event) -> None:
    last, pause = "", PULSE
    while not over.wait(pause):
        pause = min(SLOWEST, pause * 1.3)
        if installer.installing:
            progress = f"{_count_installed(home)} of {installer.wanted} packages installed"
        else:
            progress = installer.download_progress()
        if progress != last:
            _say(says=progress)
        last = progress


def _count_installed(home: str) -> int:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    try:
        names = os.listdir(f"{home}/lib/python{version}/site-packages")
    except OSError:
        return 0
    return sum(name.endswith(".dist-info") for name in names)


def _hash_error(package: str, expected: str, got: str, output: str) -> BuildError:
    """Return the error for a file with other hashes than in the lock.

    The patterns find the digests in the installer's output.
    """
    expected_match, got_match = re.search(expected, output), re.search(got, output)
    expected_digest = expected_match[1] if expected_match else "?"
    got_digest = got_match[1] if got_match else "?"
    return BuildError(
        f"{package} has other hashes than the lock (expected {expected_digest}…, got {got_digest}…)",
        "restore the lock file, or create it again to accept the changed package",
    )


def missing_package(package: str, meant: str) -> MissingFile:
    python = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {os.uname().machine}"
    why = f"the package index has no {package} for {python}"
    if meant:
        why += f"; the lock is for {meant}"
    return MissingFile(
        why,
        "use a Python version of the lock file, or pass `--python current` to use the installed packages",
    )


@contextlib.contextmanager
def hold_lock(path: str) -> Iterator[int]:
    """Hold a lock file during the block; yield its handle."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(says="waiting for another run that installs the packages")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _clear(home: str) -> None:
    for item in list(os.scandir(home)):
        if item.name == "lock":
            continue
        if item.is_dir(follow_symlinks=False):
            shutil.rmtree(item.path)
        else:
            os.unlink(item.path)


def _disk_usage(home: str) -> int:
    size = 0
    for folder, _, names in os.walk(home):
        size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    return size


def _say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def _find_full_disk(path: str | None, home: str) -> pathlib.Path:
    """Return an existing directory on the disk that has no space for a file at `path`."""
    if not path or str(path).startswith(f"{home}/"):
        path = home
    # The installer may have deleted the file's own directory meanwhile.
    folders = (pathlib.Path(path), *pathlib.Path(path).parents)
    return next(folder for folder in folders if folder.is_dir())


def main(home: str, requirements: str, uv: str = "") -> int:
    """Create the environment and print the result.  Returns the exit code."""
    try:
        build(home, requirements, uv)
    except BuildError as error:
        _say(wrong=str(error)[:LONGEST], fix=error.fix)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            disk = _find_full_disk(error.filename, home)
            fix = "free disk space, or use another disk: set RECIPE_HOME, `root` in a driver's settings, or UV_CACHE_DIR for uv's cache"
            _say(
                wrong=f"the disk of {disk} is full: {shutil.disk_usage(disk).free / 1e9:.1f} GB are free",
                fix=fix,
            )
        else:
            _say(wrong=str(error)[:LONGEST], fix="fix the cause, then run again")
    else:
        return 0
    return 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
