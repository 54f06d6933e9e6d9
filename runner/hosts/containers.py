"""Run a step's command in a container: find an engine on a host, pull the image, wrap the command.

This module covers Docker and Podman.  The module `cluster_containers` covers the engines of
clusters.

A wrapped Command is an ordinary Command: any host starts it, waits for it and stops it.  It runs a
small supervisor script (POSIX sh, `_RUN`) and, in a session of its own, a guard script (`_GUARD`):

    stop        The supervisor receives SIGTERM and sends one SIGTERM to each process in the container, as a host does for a job without a container.
                This works with an init process of the engine (`Engine.init`) and without one.
    kill -9     If the supervisor or its process group is killed, the guard notices and kills the container.
    kill -9     If the guard is killed too, the container keeps its label, and `sweep` removes it before the next run.

The command sees its directory and the targets of the symbolic links in it, at the same absolute
paths, and runs as the host's user.
"""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import re
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from drivers.base import Command, Exit, Job, Rejected

from ..digest import of_value
from ..errors import CannotRun
from . import cluster_containers, variables
from .engines import ENGINES, Engine, Image, Mount

if TYPE_CHECKING:
    from drivers.devices import Device

    from .link.client import Client

MOST = 64
"""Maximum number of mounts.  If links lead to more paths, common parent directories are mounted."""
HOME = "/tmp"  # noqa: S108  (a path in the image)
"""HOME of every step in a container.

The image's home may be read-only, and the host's home is not mounted.
"""
LABEL = "recipe.attempts"
MARK = "recipe: the container did not start"
_INIT = re.compile(
    r"ERROR \(catatonit:\d+\): failed to exec pid1: (.*)|\[FATAL tini \(\d+\)\] exec (.*) failed: (.*)"
)
"""Error messages of the init programs (catatonit, tini) for a missing program."""
_CLIENT = (
    *(
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "TMPDIR",
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "DBUS_SESSION_BUS_ADDRESS",
    ),
    *(
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "DOCKER_CONFIG",
        "DOCKER_TLS_VERIFY",
        "DOCKER_CERT_PATH",
        "DOCKER_API_VERSION",
    ),
    *(
        "CONTAINERS_CONF",
        "CONTAINERS_STORAGE_CONF",
        "CONTAINERS_REGISTRIES_CONF",
        "REGISTRY_AUTH_FILE",
        "STORAGE_DRIVER",
        "STORAGE_OPTS",
    ),
)
"""Variables with which the engine's client finds its program, its daemon and its storage."""
_PROXIES = frozenset(
    {"http_proxy", "https_proxy", "no_proxy", "all_proxy"}
    | {"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"}
)
"""Proxy variables for image registries."""
_CLIENT_PREFIXES = (
    "LD_",
    "DOCKER_",
    "CONTAINER_",
    "CONTAINERS_",
    "PODMAN_",
    "BUILDAH_",
    "STORAGE_",
    "XDG_",
    "GO",
    "_CONTAINERS_",
)
"""Prefixes of variables that the client or its loader reads.

A step's variables with these prefixes are passed as `--env NAME=value`.
"""


class Containers:
    """The containers of one run on one host, with attempt directories below `attempts`.

    The engine and each image are looked up once.

    `settings` are the driver's `container_engine` (for Slurm `container`), `engine_args` (before
    the engine's verb) and `container_args` (after it).
    """

    def __init__(
        self,
        host: Client,
        attempts: str,
        say: Callable[[str], None],
        settings: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._host, self._attempts, self._say, self._environ = host, attempts, say, environ
        self._settings = settings
        self._engine: Engine | None = None
        self._images: dict[str, Image] = {}
        self._alone = asyncio.Lock()

    async def provide_image(self, name: str) -> Image:
        """Return an image, pulled if necessary.

        The first call finds the engine and removes leftover containers.  Raises CannotRun.
        """
        async with self._alone:
            engine = self._engine or await self._find_engine()
            if name not in self._images:
                self._images[name] = await pull_image(self._host, engine, name, self._say)
            return self._images[name]

    async def _find_engine(self) -> Engine:
        given = self._settings
        self._engine = await detect(
            self._host,
            engine=str(given.get("container_engine", given.get("container", ""))),
            flags=tuple(map(str, given.get("engine_args", ()))),
            args=tuple(map(str, given.get("container_args", ()))),
            environ=self._environ,
        )
        for attempt in await sweep(self._host, self._engine, self._attempts):
            self._say(f"removed a leftover container of {attempt}")
        return self._engine

    def digest_of(self, name: str) -> str:
        """Return the digest of an image that `provide_image` found, otherwise its name."""
        return self._images[name].digest if name in self._images else name

    def wrap(
        self,
        command: Command,
        name: str,
        mounts: Sequence[Mount],
        gpus: Sequence[Device] | None = None,
        *,
        needed: bool = False,
        network: bool = True,
    ) -> Command:
        """Wrap a command for an image that `provide_image` found: see the function `wrap`."""
        assert self._engine is not None
        image = self._images[name]
        return wrap(command, image, self._engine, mounts, gpus, needed=needed, network=network)

    async def clean_up(self, attempt: str, exit: Exit) -> None:
        """Remove the container of a job that was killed or stopped.

        `attempt` is the path of its directory.
        """
        if exit.signal is not None or exit.reason != "exit":
            with suppress(CannotRun):  # without an engine there is no container
                async with self._alone:
                    engine = self._engine or await self._find_engine()
                await remove_container(self._host, engine, attempt)


# -- the host --------------------------------------------------------------------------------------


async def detect(
    host: Client,
    *,
    engine: str = "",
    flags: Sequence[str] = (),
    args: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Engine:
    """Return the container engine of a host.

    `engine` is a name or a path; without it, the first of `ENGINES` that works is used.

    `flags` precede the engine's verb, `args` follow `run`, and `environ` adds variables for the
    client.  Raises CannotRun with the missing part, and DriverError if the host cannot be asked.
    """
    names = cluster_containers.BENEATH.get(engine, engine) or "\n".join(ENGINES)
    output = await _call(host, ["sh", "-c", _DETECT, "detect", names, *flags], environ or {})
    facts: dict[str, str] = {}
    env: dict[str, str] = {}
    missing: list[str] = []
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word == "env":
            name, _, value = rest.partition("=")
            if _is_for_client(name) and value:
                env[name] = value
        elif word in ("docker", "podman", *cluster_containers.KINDS):
            info = _read_info(word, rest, facts)
            if isinstance(info, Engine):
                return replace(info, flags=tuple(flags), args=tuple(args), env=env)
            missing.append(info)
        elif word == "missing":
            missing.append(f"{rest} is not installed")
        else:
            facts[word] = rest
    raise CannotRun(
        f"a step has an `image`, but the host has no working container engine: {'; '.join(missing)}",
        fix="install podman or apptainer, or start docker; or use `--python current`, which ignores images",
    )


def _read_info(kind: str, rest: str, facts: Mapping[str, str]) -> Engine | str:
    """Parse one output line of `_DETECT`: program path, TAB, output of `info`.

    Returns an error message if the engine does not work.
    """
    path, _, text = rest.partition("\t")
    if kind in cluster_containers.KINDS:
        return _read_cluster_info(kind, path, text, facts)
    try:
        info = json.loads(text)
    except ValueError:
        return f"{path} does not work: {text.strip() or 'no error message'}"
    if kind == "podman":
        return _read_podman_info(path, info, facts)
    return _read_docker_info(path, info, facts)


def _read_docker_info(path: str, info: Mapping[str, Any], facts: Mapping[str, str]) -> Engine | str:
    if not info.get("ServerVersion"):
        errors = info.get("ServerErrors") or ["no response from its daemon"]
        return f"{path} does not work: {'; '.join(errors)}"
    rootless = any("rootless" in option for option in info.get("SecurityOptions") or ())
    # Docker names an init program even if it is missing, but then without its version.
    has_init_version = (info.get("InitCommit") or {}).get("ID") != "N/A"
    # Rootless Docker maps its user to root in the container.
    user = "0:0" if rootless else _user_of(facts)
    cards = _count_cards(facts)
    gpus = _find_docker_gpus(info, facts) if cards else ""
    return Engine(
        "docker",
        path,
        str(info["ServerVersion"]),
        user,
        rootless,
        init=bool(info.get("InitBinary")) and has_init_version,
        cards=cards,
        gpus=gpus,
        memory=_memory_bytes(facts),
    )


def _find_docker_gpus(
    info: Mapping[str, Any], facts: Mapping[str, str]
) -> Literal["", "gpus", "cdi"]:
    """Return how Docker passes GPUs to containers; "" if it cannot."""
    if "nvidia" in (info.get("Runtimes") or {}) or facts.get("hook") == "yes":
        return "gpus"
    devices = info.get("DiscoveredDevices") or ()
    if any(str(device.get("ID", "")).startswith("nvidia.com/gpu") for device in devices):
        return "cdi"
    return ""


def _read_podman_info(path: str, info: Mapping[str, Any], facts: Mapping[str, str]) -> Engine:
    version = str(info["version"]["Version"])
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    # Podman 4.8 and later search more directories for the init program catatonit.
    finds_helper = facts.get("helper") == "yes" and numbers >= (4, 8)
    init = facts.get("init") == "yes" or finds_helper
    cards = _count_cards(facts)
    has_cdi = facts.get("cdi") == "yes"
    return Engine(
        "podman",
        path,
        version,
        _user_of(facts),  # a flag keeps the uid in rootless containers
        bool(info["host"]["security"]["rootless"]),
        init=init,
        cards=cards,
        gpus="cdi" if has_cdi and cards else "",
        memory=_memory_bytes(facts),
    )


def _user_of(facts: Mapping[str, str]) -> str:
    return f"{facts.get('uid', '0')}:{facts.get('gid', '0')}"


def _count_cards(facts: Mapping[str, str]) -> int:
    return int(facts.get("cards") or 0)


def _memory_bytes(facts: Mapping[str, str]) -> int:
    return int(facts.get("memory") or 0) * 1024


def _read_cluster_info(kind: str, path: str, text: str, facts: Mapping[str, str]) -> Engine | str:
    """Parse the output line of a cluster engine, which prints only its version."""
    version = re.search(r"\d+(\.\d+)+", text)
    if version is None:
        return f"{path} does not work: {text.strip() or 'no error message'}"
    cards = _count_cards(facts)
    passes_gpus = kind == "apptainer" or facts.get("cli") == "yes"
    gpus: Literal["", "own"] = "own" if cards and passes_gpus else ""
    return Engine(kind, path, version[0], "", rootless=True, cards=cards, gpus=gpus)  # type: ignore[arg-type]


async def pull_image(
    host: Client, engine: Engine, image: str, say: Callable[[str], None] | None = None
) -> Image:
    """Return an image, pulled if it is missing, with a message to `say`.  Raises CannotRun with the engine's message; DriverError."""
    of_cluster = engine.kind in cluster_containers.KINDS
    if engine.kind == "apptainer" and image.startswith("/"):
        return Image(image, image)
    look, fetch = _image_commands(engine, image)
    try:
        output = await _call(host, look, engine.env)
        if output.split() in ([], ["[]"]):
            if say is not None:
                say(f"pulling the image {image} (first use only)")
            output = await _call(host, fetch, engine.env)
    except Rejected as error:
        reason = _find_reason(str(error)).removeprefix("sh ended with 1: ")
        other = f"create the image on the host (`{engine.kind} build`, `{engine.kind} load`)"
        if of_cluster:
            other = "use the path of an image file"
        raise CannotRun(
            f"cannot pull the image {image}: {reason}",
            fix=f"correct the image name, log in to its registry, or {other}",
        ) from error
    if of_cluster:
        return Image(output.strip(), image.partition("@")[2] or image)
    return _parse_image(image, output)


def _image_commands(engine: Engine, image: str) -> tuple[list[str], list[str]]:
    """Return the commands that inspect and pull an image."""
    if engine.kind not in cluster_containers.KINDS:
        return (
            ["sh", "-c", _LOOK, "look", image, *engine.words],
            ["sh", "-c", _PULL, "pull", _full_name(image), *engine.words],
        )
    name = cluster_containers.image_name(image)
    address = cluster_containers.image_address(engine.kind, image)
    arguments = ("image", engine.kind, name, address, *engine.words)
    return (
        ["sh", "-c", cluster_containers.LOOK, *arguments],
        ["sh", "-c", cluster_containers.FETCH, *arguments],
    )


def _find_reason(message: str) -> str:
    """Return the last line of an engine's message that looks like an error, otherwise the last
    line.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if "rror" in line or "denied" in line:
            return line
    return lines[-1] if lines else ""


def _parse_image(image: str, output: str) -> Image:
    """Parse the output of `image inspect`.  Raises CannotRun."""
    try:
        info = json.loads(output)[0]
        id = str(info["Id"])
    except (ValueError, LookupError, TypeError) as error:
        raise CannotRun(f"cannot inspect the image {image}: {output[:200]!r}") from error
    if not id.startswith("sha256:"):
        id = f"sha256:{id}"
    # An image may have several digests; another machine can pull those of a registry.
    digests = [str(name).partition("@")[2] for name in info.get("RepoDigests") or ()]
    pinned = image.partition("@")[2]
    return Image(id, pinned or next(iter(digests), id))


async def sweep(host: Client, engine: Engine, attempts: str) -> list[str]:
    """Remove the containers of finished jobs below `attempts`.

    Returns the names of their attempts.  Raises DriverError.
    """
    if engine.kind in cluster_containers.KINDS:
        return []  # containers of these engines are processes of their job
    listed = await _call(
        host,
        [
            *engine.words,
            "ps",
            "--all",
            "--filter",
            f"label={LABEL}={attempts}",
            "--format",
            "{{.Names}}",
        ],
        engine.env,
    )
    ended = []
    for name in listed.split():
        attempt = name.partition(".")[2]
        if attempt and await host.wait(Job(attempt), timedelta(0)) is not None:
            await remove_container(host, engine, f"{attempts}/{attempt}")
            ended.append(attempt)
    return ended


async def remove_container(host: Client, engine: Engine, attempt: str) -> None:
    """Remove the container of an attempt directory in any state; a missing container is no error.

    Raises DriverError.

    Call this after a killed job: the host may have killed the supervisor and the guard.
    """
    words = () if engine.kind in cluster_containers.KINDS else engine.words
    await _call(
        host,
        ["sh", "-c", _END, "end", _container_name(attempt), f"{attempt}.box", *words],
        engine.env,
    )


async def _call(host: Client, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Run `argv` on a host.

    The variables travel by stdin, because a proxy URL may contain a password.
    """

    async def lines() -> AsyncIterator[bytes]:
        for name, value in env.items():
            if _is_for_client(name) and "\n" not in value:
                yield f"{name}={value}\n".encode("utf-8", "surrogateescape")
        yield b"\n"

    script = 'while IFS= read -r v && [ -n "$v" ]; do export "$v"; done; exec "$@" </dev/null'
    data = bytearray()
    async for chunk in host.call(["sh", "-c", script, "sh", *argv], lines()):
        data += chunk
    return data.decode("utf-8", "surrogateescape")


def _is_for_client(name: str) -> bool:
    return name in _CLIENT or name in _PROXIES or name.startswith(cluster_containers.SETTINGS)


def _full_name(image: str) -> str:
    """Return an image name with its registry.  Podman may have no registry for short names."""
    first, slash, _ = image.partition("/")
    is_registry = "." in first or ":" in first or first == "localhost"
    if slash and is_registry:
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


# -- the command -----------------------------------------------------------------------------------


def base_env(login: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment of a step in a container.

    PATH, locale and time zone come from the image.
    """
    return {"HOME": HOME, "PYTHONUNBUFFERED": "1", **variables.container_variables(login)}


def find_mounts(command: Command, objects: str, writable: Iterable[str] = ()) -> list[Mount]:
    """Return the mounts of an attempt on this machine.

    These are its directory, its script, its metrics, and the targets of its links.

    `objects` is the directory of stored objects.  `writable` are the state directories that the
    step may change.
    """
    states = tuple(os.path.realpath(path) for path in writable)
    mounts = [Mount(command.cwd, True)]
    mounts += [Mount(path, True) for path in states]
    script = command.argv[-1]
    if script.startswith(f"{command.cwd}."):
        mounts.append(Mount(script))
    metrics = command.env.get("RECIPE_METRICS")
    if metrics and not metrics.startswith(f"{command.cwd}/"):
        mounts.append(Mount(metrics, True))
    return [*mounts, *map(Mount, link_targets(command.cwd, objects, states))]


def link_targets(folder: str, objects: str, others: Sequence[str] = ()) -> Sequence[str]:
    """Return the targets of the symbolic links below `folder`, without targets in the directories
    `others`.
    """
    targets: set[str] = set()
    for target in _walk_links(folder, os.path.realpath(objects), others, targets):
        targets.add(target)
    return cover_paths(targets)


def _walk_links(
    folder: str, store: str, others: Sequence[str], known: Collection[str]
) -> Iterator[str]:
    """Yield the targets of the symbolic links below `folder`, and of the links below these targets,
    that are not `known`.

    For a link into the store, yield the store, because stored objects contain no links that leave
    the store.
    """
    pending, walked = [folder], {folder}
    while pending:
        for link in _find_links(pending.pop()):
            target = os.path.realpath(link)
            if not os.path.exists(target):
                continue
            if any(_is_within(target, place) for place in (folder, *others)):
                continue
            if _is_within(target, store):
                yield store
                continue
            if not any(_is_within(target, place) for place in known):
                yield target
            if os.path.isdir(target) and target not in walked:
                walked.add(target)
                pending.append(target)


def _find_links(folder: str) -> Iterator[str]:
    """Yield the paths of the symbolic links below a directory, without following them."""
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_symlink():
                    yield entry.path


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def cover_paths(paths: Iterable[str], most: int = MOST) -> list[str]:
    """Return at most `most` directories that contain all of `paths`, none below another.

    Returns the root only if nothing else fits.
    """
    folders = _remove_nested(paths)
    while len(folders) > most:
        depth = max(path.count("/") for path in folders)
        deepest = {path for path in folders if path.count("/") == depth}
        folders = _remove_nested((set(folders) - deepest).union(map(posixpath.dirname, deepest)))
    return folders


def _remove_nested(paths: Iterable[str]) -> list[str]:
    outermost: list[str] = []
    for path in sorted(set(paths), key=lambda path: path.split("/")):
        if not outermost or not _is_within(path, outermost[-1]):
            outermost.append(path)
    return outermost


def wrap(
    command: Command,
    image: Image,
    engine: Engine,
    mounts: Sequence[Mount],
    gpus: Sequence[Device] | None = None,
    *,
    needed: bool = False,
    network: bool = True,
) -> Command:
    """Return `command`, changed to run in a container of `image`.

    Variables are passed by name, so that no secret is part of an argv.

    `gpus` are the visible GPUs, None for all of the host.  If the engine cannot pass GPUs, the
    command sees none.  Raises CannotRun if GPUs are `needed` but cannot be passed, if the engine
    does not accept a name or path, or if it cannot switch off the `network`.
    """
    if gpus and needed and not engine.gpus:
        raise _no_gpus_error(engine, len(gpus))
    if engine.kind not in cluster_containers.KINDS:
        return _wrap_with_guard(command, image, engine, mounts, gpus, network=network)
    if not network:
        raise CannotRun(
            f"{engine.kind} on the host cannot run a sandbox with the network disabled",
            fix="set `sandbox: {network: true}`, or use a host with podman or docker",
        )
    return cluster_containers.wrap(command, image.id, engine, mounts, gpus)


def _wrap_with_guard(
    command: Command,
    image: Image,
    engine: Engine,
    mounts: Sequence[Mount],
    gpus: Sequence[Device] | None,
    *,
    network: bool,
) -> Command:
    """Return `command`, changed to run in a container that outlives its client: see `_GUARD`."""
    name, box = _container_name(command.cwd), f"{command.cwd}.box"
    words = [
        *_base_flags(command, engine, name),
        *_engine_flags(engine, box),
        *_network_flags(engine, network=network),
    ]
    sees_gpus = gpus is None or bool(gpus)
    if engine.gpus and sees_gpus:
        words += _gpu_flags(gpus, engine)
    for mount in mounts:
        words += _mount_flags(mount, engine)
    env, variables_to_pass = _environment(command, engine)
    for variable in (*variables_to_pass, f"RECIPE_CONTAINER={name}", "RECIPE_JOB"):
        words += ["--env", variable]
    words += [*engine.args, image.id, *command.argv]
    init = "init" if engine.init else ""
    plan = (engine.kind, init, name, box, str(len(engine.words)), *engine.words, *words)
    return replace(command, argv=("sh", "-c", _RUN, "recipe-container", _GUARD, *plan), env=env)


def _no_gpus_error(engine: Engine, count: int) -> CannotRun:
    fix = "install nvidia-container-toolkit on the host"
    if engine.kind == "podman":
        fix += " and run `nvidia-ctk cdi generate`"
    return CannotRun(
        f"the step requires {count} GPU(s), but {engine.kind} {engine.version} on the host cannot pass GPUs to a container",
        fix=fix,
    )


def _base_flags(command: Command, engine: Engine, name: str) -> list[str]:
    """Return the verb and the flags of every container."""
    return [
        *("run", "--rm", "--name", name),
        *("--label", f"{LABEL}={posixpath.dirname(command.cwd)}"),
        *("--pull", "never", "--log-driver", "none"),
        *("--user", engine.user, "--workdir", command.cwd, "--entrypoint", ""),
        # SELinux: our files keep their labels, and the container may still read them.
        *("--security-opt", "label=disable", "--security-opt", "no-new-privileges"),
    ]


def _engine_flags(engine: Engine, box: str) -> list[str]:
    """Return the flags for the kind of the engine, the init process and the shared memory."""
    words = []
    if engine.kind == "podman":
        words += ["--http-proxy=false", "--pidfile", f"{box}/pid"]
        words += ["--conmon-pidfile", f"{box}/conmon"]
        if engine.rootless:
            words += ["--userns", "keep-id"]
    if engine.init:
        words.append("--init")
    if engine.memory and not _has_flag(engine.args, "--shm-size", "--ipc"):
        # The kernel's default for /dev/shm.  Data loaders fill the engine's default of 64 MB.
        words += ["--shm-size", str(engine.memory // 2)]
    return words


def _network_flags(engine: Engine, *, network: bool) -> list[str]:
    """Return the network flags; none if `container_args` sets the network.  Raises CannotRun if that allows a network for a sandbox."""
    if not _has_flag(engine.args, "--network", "--net"):
        mode = "host" if network else "none"
        return ["--network", mode]
    if not network and not {"none", "--network=none", "--net=none"} & {*engine.args}:
        raise CannotRun(
            "the sandbox has no network, but `container_args` sets one",
            fix="set `sandbox: {network: true}`, or remove the network option from `container_args`",
        )
    return []


def _gpu_flags(gpus: Sequence[Device] | None, engine: Engine) -> list[str]:
    """Return the GPU flags: by UUID if the engine accepts UUIDs, otherwise by the number in
    nvidia-smi (CDI).
    """
    if engine.gpus == "gpus":
        if gpus is None:
            return ["--gpus", "all"]
        names = ",".join(gpu.uuid or gpu.name for gpu in gpus)
        # Docker parses CSV: without quotes, a comma would end the value.
        return ["--gpus", f'"device={names}"']
    numbers = ["all"]
    if gpus is not None:
        numbers = [gpu.place or gpu.name for gpu in gpus]
    flags = []
    for number in numbers:
        flags += ["--device", f"nvidia.com/gpu={number}"]
    return flags


def _container_name(attempt: str) -> str:
    """Return the container name of an attempt directory, which ends with the name of the directory."""
    return f"recipe-{of_value('container', attempt)[:16]}.{posixpath.basename(attempt)}"


def _environment(command: Command, engine: Engine) -> tuple[dict[str, str], list[str]]:
    """Return the client's environment and the arguments of `--env`.

    An argument is a name, whose value the client takes from its environment.  A variable that the
    client itself reads is `NAME=value` instead, so that the step's value does not change the
    client.
    """
    own = {name: value for name, value in engine.env.items() if name in _CLIENT}
    env, named = dict(own), []
    for name, value in command.env.items():
        if _is_read_by_client(name):
            named.append(f"{name}={value}")
        else:
            env[name] = value
            named.append(name)
    for name in command.secrets:
        if _is_read_by_client(name):
            raise CannotRun(
                f"the secret {name} has a variable name that {engine.kind} itself uses",
                fix="rename the variable: `secrets: {OTHER: {from: " + name + "}}`",
            )
        named.append(name)
    return env, named


def _is_read_by_client(name: str) -> bool:
    return name in _CLIENT or name.startswith(_CLIENT_PREFIXES)


def _mount_flags(mount: Mount, engine: Engine) -> list[str]:
    path, target = mount.path, mount.target
    if not ({",", '"', "\n"} & set(path + target)):
        access = "" if mount.writable else ",readonly"
        return ["--mount", f"type=bind,source={path},target={target}{access}"]
    if {":", "\n"} & set(path + target):
        raise CannotRun(
            f"{engine.kind} cannot mount {path!r}",
            fix="rename the path without commas, quotes and colons",
        )
    access = "" if mount.writable else ":ro"
    return ["--volume", f"{path}:{target}{access}"]


def _has_flag(args: Sequence[str], *flags: str) -> bool:
    return any(arg.partition("=")[0] in flags for arg in args)


def explain(exit: Exit, tail: bytes, image: str) -> str:
    """Return an error message if the container did not start; empty if the command started.

    The message is from the end of the log.
    """
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    *_, before, last = ["", "", *lines]
    by_init = _INIT.match(last)
    if by_init is not None and exit.code in (1, 126, 127):
        return _explain_program(image, by_init[2], by_init[1] or by_init[3])
    if not last.startswith(MARK) or exit.code not in (125, 126, 127):
        return cluster_containers.explain(exit.code, last, image)
    reason = before.strip().removeprefix("docker: ").removeprefix("Error: ")
    if exit.code == 125:
        return f"cannot start a container of {image}: {reason}"
    named = re.search(r'exec: "([^"]+)"|file `([^`]+)`', reason)
    program = ""
    if named:
        program = named[1] or named[2]
    return _explain_program(image, program, reason)


def _explain_program(image: str, program: str, reason: str) -> str:
    """Return the error message for a program that could not be executed in a container."""
    program = program or "the program of the command"
    if "no such file" in reason.lower() or "not found" in reason:
        return f"the image {image} does not have {program} (a script requires /bin/sh, or bash with `shell: bash`)"
    return f"the image {image} cannot run {program}: {reason}"


# -- what runs on the host -------------------------------------------------------------------------

_DETECT = r"""
env | sed 's/^/env /'
echo "uid $(id -u)"; echo "gid $(id -g)"
echo "memory $(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)"
echo "cards $(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)"
[ -x /usr/libexec/podman/catatonit ] && echo init yes
for d in /usr/local/libexec/podman /usr/local/lib/podman /usr/lib/podman; do [ -x $d/catatonit ] && echo helper yes; done
grep -ls nvidia.com/gpu /etc/cdi/* /var/run/cdi/* | grep -q . && echo cdi yes
command -v nvidia-container-runtime-hook >/dev/null && echo hook yes
command -v nvidia-container-cli >/dev/null && echo cli yes
names=$1; shift
IFS='
'
for name in $names; do
  program=$(command -v "$name") || { echo "missing $name"; continue; }
  words=version
  case ${program##*/} in
    apptainer | singularity) kind=apptainer words=--version ;;
    enroot) kind=enroot ;;
    *) kind=docker words="info$IFS--format$IFS{{json .}}"
      "$program" --version 2>/dev/null | grep -qi podman && kind=podman words="info$IFS--format${IFS}json" ;;
  esac
  said=$(timeout 20 "$program" "$@" $words 2>&1 | tr '\n\t' '  ')
  printf '%s %s\t%s\n' $kind "$program" "$said"
done
"""

_LOOK = r"""
image=$1; shift
"$@" image inspect -- "$image" 2>/dev/null || echo
"""

_PULL = r"""
image=$1; shift
"$@" pull --quiet -- "$image" >/dev/null || exit 1
"$@" image inspect -- "$image"
"""

_END = r"""
name=$1 box=$2; shift 2
rm -rf "$box"
[ $# -gt 0 ] || exit 0
"$@" kill -s KILL "$name" >/dev/null 2>&1
"$@" rm -f "$name" >/dev/null 2>&1
:
"""

# Arguments: guard script, engine kind, "init" or "", container name, own directory, word count of
# the engine command, these words, `run ...`
_RUN = r"""
guard=$1 kind=$2 init=$3 name=$4 box=$5 n=$6; shift 6
rm -rf "$box"; mkdir -m 700 "$box" && mkfifo "$box/tell" || exit 125
[ -z "${RECIPE_METRICS-}" ] || : >>"$RECIPE_METRICS" # a file that is not there cannot be mounted
exec 3<>"$box/tell" # both ways, so that neither end waits for the other, nor minds that it is gone
setsid sh -c "$guard" guard $$ "$kind" "$init" "$name" "$box" "$n" "$@" <"$box/tell" >/dev/null 3>&- &
watch=$!
trap 'echo term >&3' TERM
setsid "$@" 3>&- </dev/null &
client=$!
echo "client $client" >&3
while :; do wait $client; code=$?; kill -0 $client 2>/dev/null || break; done
trap '' TERM
echo "done $code" >&3
exec 3>&-
wait $watch
exit $code
"""

_GUARD = r"""
script=$1 kind=$2 init=$3 name=$4 box=$5 n=$6; shift 6
total=$# left=$n
while [ $left -gt 0 ]; do set -- "$@" "$1"; shift; left=$((left - 1)); done
shift $((total - n))
trap '' TERM INT HUP
begun=$(date +%s) client=

belongs() { grep -qs "$name" "/proc/$1/cmdline"; }
end() {
  while :; do
    "$@" kill -s KILL "$name"; "$@" rm -f "$name"
    [ -n "$client" ] && belongs "$client" || return
    kill -KILL "$client"
  done >/dev/null 2>&1
}
apart() { # PID: it is in a process namespace that is not ours, and `space` is that
  space=$(readlink "/proc/$1/ns/pid") && [ -n "$space" ] && [ "$space" != "$(readlink /proc/self/ns/pid)" ]
}
beside() { # PID: the others in `space`, which is never that of the host
  ls -l /proc/[0-9]*/ns/pid 2>/dev/null | grep -F -- "-> ${space:?}" | sed 's|^.*/proc/\([0-9]*\)/ns/pid.*$|\1|' | grep -vx "$1" | sort -n
}
main() { # PID of the first process in `space`: that of the step, with which the container ends
  [ "$init" = init ] || { echo "$1"; return; }
  for other in $(beside "$1"); do grep -qs "^PPid:.$1\$" "/proc/$other/status" && echo "$other" && return; done
  return 1
}
handles() { grep -Eqs '^Sig(Blk|Ign|Cgt):.*[4-7c-f][0-9a-f]{3}$' "/proc/$1/status"; } # bit 14 of what PID blocks, ignores, catches: SIGTERM
busy() { # FIRST MAIN: another process of the container is alive
  for other in $(beside "$1"); do [ "$other" = "$2" ] || ! grep -qs '^State:.[^XZ]' "/proc/$other/status" || return 0; done
  return 1
}
# A main process that leaves SIGTERM to the kernel would end the others with it; without an init above it, the kernel keeps that signal from it.
# So it stands still until the others have saved what they want to save, as it does not hold them up outside of a container.
ask() { # FIRST: false if its main process has not begun
  main=$(main "$1") && grep -qs "RECIPE_CONTAINER=$name" "/proc/$main/environ" || return
  handles "$main" && number=TERM || number=STOP
  kill -$number "$main"
  for other in $(beside "$1"); do [ "$other" = "$main" ] || kill -TERM "$other"; done
  [ $number = STOP ] || return 0
  while busy "$1" "$main" && kill -0 "$script" && kill -0 "$client"; do sleep 0.05; done
  kill -KILL "$main"
  return 0
}
term() {
  left=20
  while kill -0 "$script" && kill -0 "$client"; do
    pid=$("$@" container inspect -f '{{.State.Status}} {{.State.Pid}}' "$name")
    case $pid in
      "running "[1-9]*)
        pid=${pid#* } left=$((left - 1))
        # Of another machine, or a container that shares the host's own processes: its engine is asked.
        if ! apart "$pid" || [ $left = 0 ]; then "$@" kill -s TERM "$name" >/dev/null; return; fi
        ask "$pid" && return ;;
    esac
    sleep 0.1
  done 2>/dev/null
}
started() {
  if [ "$kind" = podman ]; then [ -s "$box/pid" ]
  else "$@" events --since "$begun" --until "$(($(date +%s) + 1))" --filter "container=$name" --filter event=start 2>/dev/null | grep -q .; fi
}
settle() {
  left=100
  while [ -s "$box/conmon" ] && belongs "$(cat "$box/conmon")" && [ $left -gt 0 ]; do sleep 0.05; left=$((left - 1)); done
}

while read -r word rest; do
  case $word in
    client) client=$rest ;;
    term) term "$@" ;;
    done)
      case $rest in 125 | 126 | 127) started "$@" || echo "@MARK@ ($kind, exit $rest)" >&2 ;; esac
      [ "$rest" -lt 125 ] || { client=; end "$@"; }
      settle; rm -rf "$box"; exit 0 ;;
  esac
done
end "$@"; settle; rm -rf "$box"
""".replace("@MARK@", MARK)
