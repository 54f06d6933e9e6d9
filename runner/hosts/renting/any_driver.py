"""The driver name `any`, which stands for several providers."""

from __future__ import annotations

from ...errors import CannotRun, NotFound, did_you_mean
from ...extensions import drivers
from ...settings import ANY, Config
from .leases import rents


def alternatives(config: Config, name: str) -> tuple[str, ...]:
    """Return the drivers of `any` or `any:NAME,NAME`; empty for the name of one driver.

    Raises CannotRun if the settings list no drivers for `any` or a driver rents nothing, NotFound
    for an unknown driver.
    """
    if name.partition(":")[0] != ANY:
        return ()
    names = config.among(name)
    fix = f'pass `--driver {ANY}:vastai,runpod`, or set `any = ["vastai", "runpod"]` below [drivers] in recipe.toml'
    if not names:
        raise CannotRun(f"--driver {ANY} requires a list of drivers", fix=fix)

    for each in names:
        known = drivers(each)
        if each not in known:
            raise NotFound(
                f'unknown driver "{each}"',
                fix=did_you_mean(each, known) or f"known: {', '.join(sorted(known))}",
            )
        if each in ("local", "ssh") or not (rents(each) or config.driver(each).get("price")):
            raise CannotRun(
                f"--driver {ANY} cannot use {each}, which does not rent machines", fix=fix
            )
    return names


def driver_names(config: Config, name: str) -> tuple[str, ...]:
    """Return the drivers behind the name of one driver, or of `any`."""
    return alternatives(config, name) or (name,)


def denying_drivers(config: Config, name: str) -> tuple[str, ...]:
    """Return the drivers behind `name` with `secrets = "deny"`.

    If there is one, no machine of the run gets secrets.
    """
    names = driver_names(config, name)
    return tuple(each for each in names if config.driver(each).get("secrets", "send") == "deny")


def data_notice(config: Config, name: str) -> str:
    """Return a notice that names the possible recipients of a run's data and secrets; empty for a single driver."""
    names = alternatives(config, name)
    if not names:
        return ""
    *most, last = names
    recipients = f"{', '.join(most)} or {last}" if most else last
    to = f"may be sent to machines of {recipients}"
    tables = " and ".join(f"[drivers.{each}]" for each in denying_drivers(config, name))
    if not tables:
        return f"the run's data and secrets {to}"
    why = f'`secrets = "deny"` in {tables}'
    return f"the run's data {to}; its secrets are sent to none of them ({why})"
