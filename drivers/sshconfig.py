"""OpenSSH's configuration of a server, from `ssh -G`, or from asyncssh's parser without `ssh`.

Both return values as they stand in the files, by directive, and one function interprets them.
Directives that change how a server is reached but that recipe does not follow are reported.
ForwardAgent, port forwarding and commands to run after login have no effect.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

SYSTEM: Final = Path("/etc/ssh/ssh_config")
PATIENCE: Final = 30.0
"""Timeout for `ssh -G`, in seconds.

`Match exec` runs programs, and CanonicalizeHostname resolves names.
"""
DEFAULT_KEY: Final = re.compile(r"~/\.ssh/id_[a-z0-9_]+")
UNSAFE: Final = re.compile(r"[\s'\"`$\\;&<>|(){}]")
"""Characters with a meaning in a shell.

A server or user name that contains one is not passed to a ProxyCommand.
"""

# These directives do not change how a login is reached, or recipe's own settings replace them.
OF_NO_CONCERN: Final = """
addkeystoagent batchmode canonicaldomains canonicalizefallbacklocal canonicalizehostname
canonicalizemaxdots canonicalizepermittedcnames challengeresponseauthentication checkhostip
clearallforwardings compression connectionattempts controlmaster controlpath controlpersist
dynamicforward enableescapecommandline enablesshkeysign escapechar exitonforwardfailure
fingerprinthash forkafterauthentication forwardagent forwardx11 forwardx11timeout
forwardx11trusted gatewayports gssapiauthentication gssapidelegatecredentials gssapikexalgorithms
gssapikeyexchange gssapirenewalforcesrekey gssapitrustdns hashknownhosts host
hostbasedauthentication ignoreunknown include ipqos kbdinteractiveauthentication localcommand
localforward loglevel logverbose match nohostauthenticationforlocalhost numberofpasswordprompts
obscurekeystroketiming passwordauthentication permitlocalcommand permitremoteopen
preferredauthentications pubkeyauthentication rekeylimit remotecommand remoteforward requesttty
sendenv serveralivecountmax serveraliveinterval sessiontype setenv stdinnull streamlocalbindmask
streamlocalbindunlink stricthostkeychecking syslogfacility tag tcpkeepalive tunnel tunneldevice
updatehostkeys usekeychain verifyhostkeydns visualhostkey xauthlocation
"""
FOLLOWED: Final = """
addressfamily certificatefile connecttimeout globalknownhostsfile hostkeyalias hostname
identitiesonly identityagent identityfile port proxycommand proxyjump user userknownhostsfile
"""

_Values: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """OpenSSH's configuration of one server. Missing settings are empty."""

    host: str = ""
    user: str = ""
    port: int = 0
    identity: tuple[str, ...] = ()
    identities_only: bool = False
    certificates: tuple[str, ...] = ()
    agent: str | None = None  # path of a socket; empty for no agent
    jump: str = ""
    proxy: str = ""  # a command for /bin/sh that connects, its tokens filled
    known_hosts: tuple[str, ...] = ()
    alias: str = ""  # name of its host key in known_hosts
    family: int = 0
    patience: float = 0.0
    passed_over: tuple[str, ...] = ()  # directives that have no effect here


class SshConfig:
    """This user's SSH configuration.  Looks up each server once."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._known: dict[tuple[str, str, int], ServerConfig] = {}

    def settings_of(self, name: str, user: str = "", port: int = 0) -> ServerConfig:
        """Return the configuration of `name`, with `user` and `port` from the address.

        Raises OSError, and ValueError for invalid files.
        """
        asked = name, user, port
        if asked not in self._known:
            self._known[asked] = self._settings_of(*asked)
        return self._known[asked]

    def _settings_of(self, name: str, user: str, port: int) -> ServerConfig:
        if name.startswith("-"):
            raise ValueError(f'"{name}" is not the name of a server')
        program = shutil.which("ssh")
        if program is not None:
            values = _ask_client(program, self._home, name, user, port)
            usual = _client_defaults(program)
            changed = {word for word, given in values.items() if given != usual.get(word)}
        else:
            values = _read(self._home, name, user, port)
            changed = {*values}
        passed_over = changed.difference(OF_NO_CONCERN.split(), FOLLOWED.split())
        return _make_said(values, passed_over, self._home, name, user, port)


# --- values from OpenSSH's client


def _ask_client(program: str, home: Path, name: str, user: str, port: int) -> _Values:
    words: list[str] = []
    if user:
        words += ["-l", user]
    if port:
        words += ["-p", str(port)]
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    if home == account:
        return _run_client([program, "-G", *words, "--", name])
    # The client ignores $HOME and reads the account's home; the rest of recipe, like most programs,
    # follows $HOME.
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.writelines(f'Include "{each}"\n' for each in (home / ".ssh" / "config", SYSTEM))
        file.flush()
        values = _run_client([program, "-F", file.name, "-G", *words, "--", name])
    moved = dict(values)
    for word in ("userknownhostsfile", "identityagent"):
        if word in values:
            moved[word] = [_move_below_home(each, account, home) for each in values[word]]
    return moved


def _move_below_home(text: str, account: Path, home: Path) -> str:
    return re.sub(rf"(?<!\S){re.escape(str(account))}(?=/)", lambda _: str(home), text)


@cache
def _client_defaults(program: str) -> _Values:
    """Return the SSH client's defaults, without any configuration file."""
    return _run_client([program, "-F", "none", "-G", "--", "localhost"])


def _run_client(argv: Sequence[str]) -> _Values:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"no response from `ssh -G` within {PATIENCE:g} s") from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ValueError("; ".join(said[-3:]) or f"`ssh -G` ended with {done.returncode}")
    values: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        word, _, value = line.partition(" ")
        values.setdefault(word.lower(), []).append(value)
    return values


# --- values without a client


def _read(home: Path, name: str, user: str, port: int) -> _Values:
    """Return a server's settings like `ssh -G`, from asyncssh's parser."""
    from asyncssh.config import SSHClientConfig

    class Noting(dict[str, Any]):
        """The parser's directives, which records unknown directives that occur."""

        def __missing__(self, word: str) -> Any:
            met.add(word)
            raise KeyError(word)

    class Reader(SSHClientConfig):
        _handlers = Noting(SSHClientConfig._handlers)

    Reader._percent_expand = set()  # `_Filling` expands tokens
    met: set[str] = set()
    paths = [str(path) for path in (home / ".ssh" / "config", SYSTEM) if path.is_file()]
    found = Reader.load(
        None, paths, False, False, False, getpass.getuser(), user or (), name, port or ()
    )
    values: dict[str, list[str]] = {word: [] for word in met}
    for option, value in found.get_options(False).items():
        word = option.lower()
        if word == "addressfamily":
            value = {socket.AF_INET: "inet", socket.AF_INET6: "inet6"}.get(value, "any")  # type: ignore[call-overload]
        if isinstance(value, list):
            one = word in ("userknownhostsfile", "globalknownhostsfile")
            values[word] = [" ".join(value)] if one else [*map(str, value)]
        else:
            shown = {True: "yes", False: "no", None: "none"}.get(value, value)  # type: ignore[call-overload]
            values[word] = [str(shown)]
    return values


# --- interpretation


def _make_said(
    values: _Values, passed_over: set[str], home: Path, name: str, user: str, port: int
) -> ServerConfig:
    def one(word: str) -> str:
        given = values.get(word, ())
        return "" if not given or given[0].lower() == "none" else given[0]

    host = one("hostname").replace("%h", name).replace("%%", "%")
    given_user, number = user or one("user"), port or int(one("port") or 22)
    login = given_user or pwd.getpwuid(os.getuid()).pw_name
    fill = _Filling(home, name, host or name, number, login, one("hostkeyalias")).fill
    identity = tuple(each for each in values.get("identityfile", ()) if each.lower() != "none")
    only = one("identitiesonly") in ("yes", "true")
    # The client prints its default keys like those of a configuration file.
    are_defaults = len(identity) > 3 and all(map(DEFAULT_KEY.fullmatch, identity))
    if are_defaults and not only:
        identity = ()
    known = [*_paths(one("userknownhostsfile")), *_paths(one("globalknownhostsfile"))]
    proxy, agent = one("proxycommand"), values.get("identityagent")
    if proxy:
        # The proxy command is a line for a shell, in which these words must stay words.
        bad = next(filter(UNSAFE.search, (name, host, login)), "")
        if bad:
            raise ValueError(f'cannot pass "{bad}" to the ProxyCommand of {name}')
    return ServerConfig(
        host=host,
        user=given_user,
        port=number,
        identity=tuple(map(fill, identity)),
        identities_only=only,
        certificates=tuple(map(fill, values.get("certificatefile", ()))),
        agent=None if agent is None else _socket(fill(agent[0])),
        jump=one("proxyjump"),
        proxy=fill(proxy),
        known_hosts=tuple(map(fill, known)),
        alias=one("hostkeyalias"),
        family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(one("addressfamily"), 0),
        patience=float(one("connecttimeout") or 0),
        passed_over=tuple(sorted(passed_over)),
    )


def _socket(said: str) -> str | None:
    """Return the path of the SSH agent's socket for an IdentityAgent value.

    None for `SSH_AUTH_SOCK`, empty for `none`, and the variable's value for `$NAME`.
    """
    if said.lower() == "none":
        return ""
    if said == "SSH_AUTH_SOCK":
        return None
    return os.environ.get(said[1:], "") if said.startswith("$") else said


def _paths(text: str) -> list[str]:
    """Return the file paths in one configuration line.

    The client prints paths without quotes, so a word that starts no path belongs to the previous
    one.
    """
    found: list[str] = []
    for word in text.split():
        if found and not word.startswith(("/", "~", "$", "%")):
            found[-1] += f" {word}"
        elif word.lower() != "none":
            found.append(word)
    return found


class _Filling:
    """Expansion of OpenSSH tokens (`%h`), variables (`${HOME}`) and `~/`, as in ssh_config(5)."""

    def __init__(self, home: Path, name: str, host: str, port: int, user: str, alias: str) -> None:
        here = socket.gethostname()
        self._home = home
        self._tokens = {
            "%": "%",
            "C": hashlib.sha1(
                f"{here}{host}{port}{user}".encode(), usedforsecurity=False
            ).hexdigest(),
            "d": str(home),
            "h": host,
            "i": str(os.getuid()),
            "k": alias or name,
            "L": here.partition(".")[0],
            "l": here,
            "n": name,
            "p": str(port),
            "r": user,
            "u": pwd.getpwuid(os.getuid()).pw_name,
        }

    def fill(self, value: str) -> str:
        """Expand tokens, variables and `~/` in a value. Unknown tokens stay unchanged.

        Raises ValueError for an unset variable.
        """
        value = re.sub(r"\$\{(\w+)\}|%(.)", self._of, value)
        return f"{self._home}/{value[2:]}" if value.startswith("~/") else value

    def _of(self, match: re.Match[str]) -> str:
        if match[2]:
            return self._tokens.get(match[2], match[0])
        if match[1] not in os.environ:
            raise ValueError(f"the variable {match[1]} is used in a value but not set")
        return os.environ[match[1]]
