"""The environment of a lock is built once, for all callers and after any kill; what keeps it from being built is said in a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.hosts import _builder, uv
from tests.servers.packages import Index
from tests.support import Space, until
from tests.tools import needs

STEP = "run: [python, -c, 'import sys, tinyword; print(tinyword.word, file=open(sys.argv[1], chr(119)))', '{{ outputs.o }}']"
RECIPE = f"python: {{lock: lock.txt}}\nsteps:\n  one:\n    {STEP}\n    outputs: {{o: o.txt}}\n"
BUILDER = Path(_builder.__file__)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path) as index:
        yield index


def locked(space: Space, index: Index, *more: str) -> None:
    space.recipe(RECIPE)
    space.write(
        "lock.txt", index.wheel("tinyword", "word = 'said'\n", bulk=100_000) + "".join(more)
    )


def home(space: Space) -> Path:
    [found] = (space.root / ".recipe/envs").iterdir()
    return found


def builders(space: Space) -> list[int]:
    """Processes that build below a workspace, pip and all."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{space.root}/.recipe/envs/".encode() in words:
                found.append(int(entry.name))
    return found


# -- once


def test_an_environment_is_reported_by_its_size_and_the_time_it_took_and_used_again(
    space: Space, index: Index
) -> None:
    locked(space, index)
    code, _, said = space.command("run", env=index.environ)
    assert code == 0 and re.search(
        r"^lock.txt: 1 package, \d\S* .B, installed in \S+s$", said, re.M
    ), said
    assert space.read("o.txt") == "said\n"
    assert not (home(space) / "fetched").exists()
    code, _, said = space.command("run", "-B", env=index.environ)
    assert code == 0 and "install" not in said
    assert len(index.asked) == 1


def killed_at_work(space: Space, index: Index) -> None:
    """A run is killed while it installs; what it began waits at the index's gate."""
    locked(space, index)
    index.gate.clear()
    first = space.start("run", env=index.environ)
    until(lambda: index.asked)
    first.kill()
    first.communicate()


def test_what_a_killed_run_began_to_install_goes_on_and_the_next_run_takes_it(
    space: Space, index: Index
) -> None:
    killed_at_work(space, index)
    second = space.start("run", env=index.environ)
    assert second.stderr is not None
    said = [second.stderr.readline() for _ in range(3)]
    assert (
        "resuming run" in said[0]
        and "waiting for another run that installs the packages" in said[2]
    )
    index.gate.set()
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert space.read("o.txt") == "said\n" and len(index.asked) == 1


def test_an_install_that_was_killed_itself_is_begun_anew(space: Space, index: Index) -> None:
    killed_at_work(space, index)
    for process in builders(space):
        with contextlib.suppress(ProcessLookupError):  # it ended with another of them
            os.kill(process, signal.SIGKILL)
    until(lambda: not builders(space))
    assert (home(space) / "fetched").exists() and not (home(space) / "complete").exists()
    index.gate.set()
    code, _, said = space.command("run", env=index.environ)
    assert code == 0, said
    assert space.read("o.txt") == "said\n" and not (home(space) / "fetched").exists()


def test_two_runs_that_want_one_environment_build_it_once(space: Space, index: Index) -> None:
    locked(space, index)
    space.recipe(RECIPE.replace("one:", "other:").replace("o.txt", "p.txt"), name="other.yaml")
    index.gate.clear()
    first = space.start("run", env=index.environ)
    until(lambda: index.asked)
    second = space.start("run", "./other.yaml", env=index.environ)
    assert second.stderr is not None
    second.stderr.readline()
    waits = second.stderr.readline()
    assert f"process {first.pid} is installing the packages; waiting" in waits
    index.gate.set()
    assert [
        process.communicate(timeout=60) and process.returncode for process in (first, second)
    ] == [0, 0]
    assert space.read("p.txt") == "said\n" and len(index.asked) == 1


def test_ctrl_c_ends_an_install_at_once_and_costs_nothing_but_that(
    space: Space, index: Index
) -> None:
    locked(space, index)
    index.gate.clear()
    run = space.start("run", env=index.environ)
    until(lambda: index.asked)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert (
        run.returncode == 130
        and "failed" not in err.replace("0 failed", "")
        and "Traceback" not in err
    ), err
    until(lambda: not builders(space))
    index.gate.set()
    assert space.command("run", env=index.environ)[0] == 0


def test_ctrl_c_ends_a_run_that_waits_for_the_install_of_another(
    space: Space, index: Index
) -> None:
    locked(space, index)
    space.recipe(RECIPE.replace("one:", "other:").replace("o.txt", "p.txt"), name="other.yaml")
    index.gate.clear()
    first = space.start("run", env=index.environ)
    until(lambda: index.asked)
    second = space.start("run", "./other.yaml", env=index.environ)
    assert second.stderr is not None
    assert "; waiting" in second.stderr.readline() + second.stderr.readline()
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 130 and "Traceback" not in err, err
    index.gate.set()
    assert first.communicate(timeout=60) and first.returncode == 0


def test_an_environment_whose_python_is_gone_is_built_again(space: Space, index: Index) -> None:
    locked(space, index)
    space.command("run", env=index.environ)
    python = home(space) / "bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    code, _, said = space.command("run", "-B", env=index.environ)
    assert code == 0, said


def test_a_python_without_pip_gives_the_environment_one_of_its_own(
    tmp_path: Path, index: Index
) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    (tmp_path / "lock.txt").write_text(index.wheel("tinyword", "word = 'said'\n"))
    made = subprocess.run(
        [tmp_path / "bare/bin/python", "-I", BUILDER, tmp_path / "made", "lock.txt"],
        cwd=tmp_path,
        env={
            **os.environ,
            **index.environ,
            "PIP_TARGET": str(tmp_path / "elsewhere"),
            "PYTHONPATH": "/nowhere",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(made.stdout.splitlines()[-1])["done"]["packages"] == 1
    assert (
        subprocess.run(
            [tmp_path / "made/bin/python", "-c", "import tinyword, pip"], check=False
        ).returncode
        == 0
    )
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("pin", ["1.0", "1.0.0"])
def test_a_pin_without_a_local_version_is_no_build_that_has_one(
    tmp_path: Path, index: Index, pin: str
) -> None:
    line = index.wheel("tinyword").replace("==1.0 ", f"=={pin} ")
    index.wheel("tinyword", "word = 'of the processor'", version="1.0+cpu")
    (tmp_path / "lock.txt").write_text(line)
    argv = [sys.executable, "-I", BUILDER, tmp_path / "made", "lock.txt", uv.find_uv()]
    made = subprocess.run(
        argv,
        cwd=tmp_path,
        env={**os.environ, **index.environ},
        check=False,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout


def test_a_second_environment_shares_the_files_of_the_first(space: Space, index: Index) -> None:
    locked(space, index)
    space.command("run", env=index.environ)
    [module] = home(space).glob("lib/python*/site-packages/tinyword.py")
    space.write("lock.txt", f"# other bytes\n{space.read('lock.txt')}")
    code, _, said = space.command("run", env=index.environ)
    assert code == 0 and len(index.asked) == 1, said
    assert module.stat().st_nlink >= 3  # one in the cache, one in each


def test_the_index_of_pip_counts_for_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://mirror/simple\nfind-links = /nowhere\n    https://wheels\ntimeout = 9\n"
    )
    environ = {
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_TIMEOUT": "7",
        "PIP_EXTRA_INDEX_URL": "https://a https://b",
        "XDG_CONFIG_HOME": "/nowhere",
    }
    found = _builder.translate_pip_settings(environ)
    assert (
        found["UV_DEFAULT_INDEX"] == "https://mirror/simple"
        and found["UV_INDEX"] == "https://a https://b"
    )
    assert found["UV_FIND_LINKS"] == "https://wheels" and found["UV_HTTP_TIMEOUT"] in ("7", "9")


@pytest.mark.parametrize("program", ["", "uv"])
def test_no_index_of_pip_installs_and_locks_from_find_links_alone(
    space: Space, index: Index, program: str
) -> None:
    """Also with the uv that has no variable for it."""
    (space.root / "lock.txt").write_text(index.wheel("tinyword", "word = 'said'\n"))
    space.write("requirements.txt", "tinyword\n")
    settings = {"PIP_NO_INDEX": "true", "PIP_FIND_LINKS": str(space.root / "wheels")}
    environ = {**os.environ, **index.environ, **settings}
    index.save(space.root / "wheels")
    argv = [sys.executable, "-I", BUILDER, "made", "lock.txt", uv.find_uv() if program else ""]
    made = subprocess.run(
        argv, cwd=space.root, env=environ, check=False, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout
    assert space.command("lock", "requirements.txt", env=environ)[0] == 0
    assert index.asked == []
    shutil.rmtree(space.root / "wheels")
    shutil.rmtree(space.root / "made")
    shutil.rmtree(index.environ["UV_CACHE_DIR"])
    made = subprocess.run(
        argv, cwd=space.root, env=environ, check=False, capture_output=True, text=True
    )
    assert made.returncode == 1 and "tinyword" in made.stdout and index.asked == []


def test_an_index_of_uv_comes_before_that_of_pip_also_under_its_old_name() -> None:
    environ = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "https://pip/simple"}
    assert _builder.translate_pip_settings(environ) == {"UV_DEFAULT_INDEX": "https://pip/simple"}
    assert _builder.translate_pip_settings({**environ, "UV_INDEX_URL": "https://uv/simple"}) == {}


def test_no_index_of_pip_does_not_rule_out_an_index_of_uv() -> None:
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
    assert _builder.no_index_option(pip) == ("--no-index",)
    assert _builder.no_index_option({**pip, "UV_INDEX": "https://mirror/simple"}) == ()
    assert _builder.no_index_option({**pip, "PIP_NO_INDEX": "false"}) == ()


def test_a_machine_that_no_uv_runs_on_has_its_pip_do_it(tmp_path: Path) -> None:
    assert (
        not _builder._can_run("")
        and not _builder._can_run(str(tmp_path / "none"))
        and not _builder._can_run("/bin/false")
    )
    assert uv.fetch_uv("Plan9 mips", tmp_path) == ""


def test_another_machine_builds_its_own_with_the_uv_that_it_is_sent(
    space: Space, index: Index, tmp_path: Path
) -> None:
    locked(space, index)
    words = " ".join(f"{name}={value}" for name, value in index.environ.items())
    python = space.write("python", f'#!/bin/sh\n{words} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    space.write("recipe.toml", f'[drivers.loopback]\npython = "{python}"\n')
    code, _, said = space.command("run", "--driver", "loopback")
    assert code == 0 and "lock.txt on loopback host-1: 1 package," in said
    assert space.read("o.txt") == "said\n" and len(index.asked) == 1
    assert not (space.root / ".recipe/envs").exists()
    code, _, said = space.command("run", "-B", "--driver", "loopback")
    assert code == 0 and "install" not in said


def test_two_machines_install_at_the_same_time(space: Space, index: Index) -> None:
    locked(space, index)
    space.recipe(
        RECIPE.replace("  one:\n", "  one:\n    matrix: {i: [1, 2]}\n").replace(
            "o.txt", "'o{{ matrix.i }}.txt'"
        )
    )
    words = " ".join(f"{name}={value}" for name, value in index.environ.items())
    python = space.write(
        "python", f'#!/bin/sh\n{words} UV_CACHE_DIR="$PWD/cache" exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    space.write("recipe.toml", f'[drivers.loopback]\npython = "{python}"\nhosts = 2\n')
    index.gate.clear()
    run = space.start("run", "--driver", "loopback")
    until(lambda: len(index.asked) == 2)
    index.gate.set()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 0 and "lock.txt on loopback host-2: 1 package," in err, err
    assert space.read("o1.txt") == space.read("o2.txt") == "said\n"


# -- of a version


def other_python(space: Space, version: str) -> dict[str, str]:
    """Variables of a shell that finds a Python of another version; it only says so."""
    program = space.write(
        f"bin/python{version}",
        f'#!/bin/sh\ncase "$2" in *version_info*) echo {version} ;; *) exec {sys.executable} "$@" ;; esac\n',
    )
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("lock", ["", "lock: lock.txt, "])
def test_a_step_runs_with_the_python_of_the_version_that_it_asks_for(
    space: Space, index: Index, lock: str
) -> None:
    locked(space, index)
    space.recipe(
        RECIPE.replace("lock: lock.txt", f'{lock}version: "3.14"')
        .replace("import sys, tinyword", "import sys")
        .replace("tinyword.word", "sys.prefix")
    )
    code, _, said = space.command("run", env={**index.environ, **other_python(space, "3.14")})
    assert code == 0, said
    assert space.read("o.txt").strip() == str(home(space)) and home(space).name.endswith(
        "python3.14"
    )


def test_the_python_at_hand_does_if_it_is_of_that_version(space: Space) -> None:
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    space.recipe(
        f'python: {{version: "{ours}"}}\nsteps: {{one: {{run: "touch o.txt", outputs: {{o: o.txt}}}}}}\n'
    )
    assert space.command("run")[0] == 0 and not (space.root / ".recipe/envs").exists()


def test_a_version_that_is_not_there_is_refused_with_the_line_that_installs_it(
    space: Space,
) -> None:
    space.recipe(
        'python: {version: "3.99"}\nsteps: {one: {run: "touch o.txt", outputs: {o: o.txt}}}\n'
    )
    code, _, said = space.command("run")
    assert (
        code == 2
        and "Python 3.99 is not installed on this machine" in said
        and "uv python install 3.99" in said
    )


def test_a_version_without_quotes_is_refused_because_it_may_be_another_number(space: Space) -> None:
    space.recipe("python: {version: 3.10}\nsteps: {one: {run: touch o.txt, outputs: {o: o.txt}}}\n")
    code, out, said = space.command("validate")
    assert code == 3 and "in quotes" in out + said, out + said


# -- what keeps it from being built


@pytest.mark.parametrize("driver", ["local", "loopback"])
def test_an_index_that_does_not_answer_is_named_without_its_password(
    space: Space, index: Index, driver: str
) -> None:
    locked(space, index)
    environ = {
        **index.environ,
        "PIP_INDEX_URL": "http://someone:secret@127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
    }
    words = " ".join(f"{name}={value}" for name, value in environ.items())
    python = space.write("python", f'#!/bin/sh\n{words} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    space.write("recipe.toml", f'[drivers.loopback]\npython = "{python}"\n')
    code, _, said = space.command("run", "--driver", driver, env=environ)
    where = " on loopback host-1" if driver == "loopback" else ""
    assert (
        code == 2
        and f"lock.txt{where}: cannot reach the package index (http://127.0.0.1:9/simple/tinyword/)"
        in said
    )
    assert said.count("trying again") == 2 and "secret" not in said and "Traceback" not in said
    assert "fix: check the network and the package index in PIP_INDEX_URL, then run again" in said


@pytest.mark.parametrize("program", ["", "uv"])
def test_an_index_that_no_variable_of_the_host_names_is_one_of_its_files(
    tmp_path: Path, index: Index, program: str
) -> None:
    """The variables of the user's shell do not reach the installer on a host."""
    (tmp_path / "lock.txt").write_text(index.wheel("tinyword"))
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text(
        "[global]\nindex-url = http://127.0.0.1:9/simple\nretries = 1\n"
    )
    made = subprocess.run(
        [sys.executable, "-I", BUILDER, "made", "lock.txt", uv.find_uv() if program else ""],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    fix = json.loads(made.stdout.splitlines()[-1])["fix"]
    files = "~/.config/uv/uv.toml or pip.conf" if program else "pip.conf"
    assert (
        fix == f"check the network and the package index in {files} of the machine, then run again"
    )


def test_a_file_that_is_not_the_locked_one_is_named_and_nothing_is_left(
    space: Space, index: Index
) -> None:
    locked(space, index)
    pinned = space.read("lock.txt")
    space.write("lock.txt", pinned.replace(pinned[-65:-1], "0" * 64))
    code, _, said = space.command("run", env=index.environ)
    assert (
        code == 2
        and "tinyword==1.0" in said
        and f"expected 000000000000…, got {pinned[-65:-53]}…" in said
    )
    assert [item.name for item in home(space).iterdir()] == ["lock"]


def test_a_package_that_no_file_of_fits_this_python_is_named(space: Space, index: Index) -> None:
    locked(space, index, f"nosuch==2.0 --hash=sha256:{'0' * 64}\n")
    space.write(
        "lock.txt",
        f"# Made by make.py from some.in: Linux, x86_64, CPython 2.7.\n{space.read('lock.txt')}",
    )
    code, _, said = space.command("run", env=index.environ)
    machine = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {os.uname().machine}"
    assert (
        code == 2
        and f"has no nosuch==2.0 for {machine}; the lock is for Linux, x86_64, CPython 2.7" in said
    )


def test_what_a_lock_forgot_is_named_with_who_needs_it(space: Space, index: Index) -> None:
    index.wheel("forgotten")
    locked(space, index, index.wheel("other", needs="forgotten>=0.5"))
    code, _, said = space.command("run", env=index.environ)
    assert code == 2 and ": the lock does not pin forgotten, which other needs\n" in said


def test_a_package_that_another_wants_with_an_extra_is_pinned_by_its_name(
    space: Space, index: Index
) -> None:
    locked(space, index, index.wheel("wanted"), index.wheel("other", needs="wanted[more]>=0.5"))
    code, _, said = space.command("run", env=index.environ)
    assert code == 0, said


def test_a_disk_that_is_too_small_is_reported_and_is_empty_again(
    space: Space, index: Index
) -> None:
    locked(space, index, index.wheel("large", bulk=9_000_000))
    small = space.root / "small"
    small.mkdir()
    needs("mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(small)], check=True)
    try:
        code, _, said = space.command("run", env={**index.environ, "RECIPE_HOME": str(small)})
        assert code == 2 and ": the disk of " in said and "is full: 0.0 GB are free" in said
        assert shutil.disk_usage(small).used < 2_000_000
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
