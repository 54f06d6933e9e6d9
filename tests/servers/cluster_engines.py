"""Stand-ins for Apptainer and Enroot, which no package index has.  They take the same words, refuse others, and run the command in a root of its own.

    install(folder, images)      # programs `apptainer` and `enroot` there; `docker://team/name` is the file `team_name` in `images`
    image(path)                  # a file that either takes for an image

Written after the sources of Apptainer 1.4 and Enroot 4.0: which variables come through and how, which process gets which signal, what is said of a program that
is not there.  What they have not: user namespaces, file formats, registries, GPUs.
"""

from __future__ import annotations

import csv
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NEW_MOUNTS = 0x00020000
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def install(folder: Path, images: Path) -> None:
    """Put the programs there; `images` is what registries have."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("apptainer", "enroot"):
        (folder / name).write_text(
            f'#!/bin/sh\nRECIPE_TEST_IMAGES="{images}" exec {sys.executable} -I -S {__file__} {name} "$@"\n'
        )
        (folder / name).chmod(0o755)


def image(path: Path, applets: tuple[str, ...]) -> Path:
    """A file that stands for an image, of a static busybox under these names."""
    from tests.servers.engines import root_of

    path.write_bytes(root_of(applets))
    return path


def squashed(image: Path) -> None:
    """Make it a file that a real Enroot takes."""
    with tempfile.TemporaryDirectory() as root:
        unpack(str(image), root)
        Path(root, "etc").mkdir()
        Path(root, "etc", "environment").write_text("FROM_IMAGE=yes\nPATH=/bin\n")
        image.unlink()
        subprocess.run(
            ["mksquashfs", root, image, "-quiet", "-no-progress"],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def fetched(uri: str, to: str) -> bool:
    """Copy what a registry has under that name."""
    source = Path(os.environ["RECIPE_TEST_IMAGES"], uri.removeprefix("docker://").replace("/", "_"))
    if not source.exists():
        return False
    shutil.copy(source, to)
    return True


def enter(root: str, binds: list[tuple[str, str, bool]], host: tuple[str, ...]) -> None:
    """Make `root` the root of this process, with these parts of the host, and what is bound to where: (source, destination, writable)."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    for source, at, writable in [*((each, each, True) for each in host), *binds]:
        target = Path(f"{root}{at}")
        if os.path.isdir(source):
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        mount("--rbind", source, str(target))
        if not writable:
            mount("-o", "remount,bind,ro", str(target))
    os.chroot(root)


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def apptainer(words: list[str]) -> int:
    if words == ["--version"]:
        print("apptainer version 1.4.5")
        return 0
    if words[0] == "pull":
        if not fetched(words[2], words[1]):
            print(
                "FATAL:   While making image from oci registry: error fetching image: manifest unknown",
                file=sys.stderr,
            )
            return 255
        return 0
    assert words.pop(0) == "exec", words
    binds, home, pwd, nv = [], "", "/", False
    while words[0].startswith("-"):
        flag = words.pop(0)
        if flag == "--mount":
            fields = next(csv.reader([words.pop(0)]))
            said = dict(field.partition("=")[::2] for field in fields)
            assert (
                set(said) <= {"type", "source", "destination", "ro"} and said["type"] == "bind"
            ), said
            binds.append((said["source"], said["destination"], "ro" not in said))
        elif flag == "--home":
            home = words.pop(0)
        elif flag == "--pwd":
            pwd = words.pop(0)
        elif flag == "--nv":
            nv = True
        else:
            print(f'Error for command "exec": unknown flag: {flag}', file=sys.stderr)
            return 1
    file, *argv = words
    env = {"FROM_IMAGE": "yes"} | {
        name: value
        for name, value in os.environ.items()
        if name not in ("HOME", "PATH", "LD_LIBRARY_PATH")
        and not name.startswith(("APPTAINER", "SINGULARITY"))
    }
    apart = {
        name.removeprefix("APPTAINERENV_"): value
        for name, value in os.environ.items()
        if name.startswith("APPTAINERENV_")
    }
    env |= (
        {"PATH": DEFAULT_PATH, "APPTAINER_CONTAINER": file}
        | {name: value for name, value in apart.items() if name != "HOME"}
        | {"HOME": home}
    )
    with tempfile.TemporaryDirectory() as root:
        child = os.fork()
        if child == 0:
            unpack(file, root)
            (Path(root) / "nv").touch() if nv else None
            enter(root, [(home, home, True), *binds], ("/proc", "/dev", "/sys", "/tmp"))
            os.chdir(pwd)
            try:
                os.execvpe(argv[0], argv, env)
            except OSError as error:
                why = (
                    "executable file not found in $PATH"
                    if isinstance(error, FileNotFoundError)
                    else "permission denied"
                )
                print(f'FATAL:   "{argv[0]}": {why}', file=sys.stderr)
                os._exit(255)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, lambda got, _: os.kill(child, got)
            )  # nobody has a terminal, so it hands them on
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def unpack(file: str, root: str) -> None:
    with tarfile.open(file) as tar:
        tar.extraction_filter = getattr(
            tarfile, "fully_trusted_filter", None
        )  # since Python 3.11.4
        tar.extractall(root)


def enroot(words: list[str]) -> int:
    data = Path(os.environ["ENROOT_DATA_PATH"])
    data.mkdir(parents=True, exist_ok=True)
    verb, *words = words
    if verb == "version":
        print("4.0.1")
    elif verb == "list":
        print("\n".join(path.name for path in data.iterdir()))
    elif verb == "import":
        assert words[0] == "--output", words
        if not fetched(words[2].replace("#", "/"), words[1]):
            print(
                "[ERROR] Could not process JSON input\n[ERROR] URL returned error code: 404 Not Found",
                file=sys.stderr,
            )
            return 1
    elif verb == "create":
        assert words[:2] == ["--force", "--name"], words
        unpack(words[3], str(data / words[2]))
    else:
        return started(data, words)
    return 0


def started(data: Path, words: list[str]) -> int:
    """`enroot start`: the script that is named first may write the script that begins the command."""
    binds, conf = [], ""
    while words[0].startswith("-"):
        flag = words.pop(0)
        if flag == "--mount":
            source, at, kind, options = (
                field.replace("\\040", " ").replace("\\134", "\\")
                for field in words.pop(0).split(":")
            )
            assert kind == "none" and {"bind", "x-create=auto"} < set(options.split(",")), options
            binds.append((source, at, "ro" not in options.split(",")))
        elif flag == "--conf":
            conf = words.pop(0)
        elif flag != "--rw":
            print(
                "Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]", file=sys.stderr
            )
            return 1
    name, *argv = words
    with tempfile.TemporaryDirectory() as runtime:
        makes = 'set -euo pipefail; source "$0"; ! declare -F hooks >/dev/null || hooks; ! declare -F rc >/dev/null || declare -f rc | sed "1,2d;\\$d" > "$1/rc"'
        subprocess.run(
            ["bash", "-c", makes, conf, runtime],
            env={**os.environ, "ENROOT_RUNTIME_PATH": runtime},
            check=True,
        )
        script = Path(runtime, "rc").read_text()
    enter(str(data / name), [*binds], ("/proc", "/dev", "/sys"))
    os.chdir("/")
    begins = os.memfd_create("rc", 0)  # not an argument: there are secrets in it
    os.write(begins, script.encode("utf-8", "surrogateescape"))
    os.execve(
        "/bin/sh",
        ["sh", f"/proc/self/fd/{begins}", *argv],
        {"FROM_IMAGE": "yes", "PATH": "/bin", "HOME": "/root"},
    )


if __name__ == "__main__":
    sys.exit({"apptainer": apptainer, "enroot": enroot}[sys.argv[1]](sys.argv[2:]))
