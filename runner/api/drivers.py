"""Available drivers, and the missing requirements of each. Contacts no provider."""

from __future__ import annotations

from typing import Final

from drivers import DRIVERS

from .. import extensions
from ..errors import RecipeError
from ..hosts.renting.leases import create_driver
from ..storage.workspace import Workspace
from .values import Facts

LOCAL: Final = "local"


def list_drivers(ws: Workspace) -> list[Facts]:
    """List the available drivers: this machine first, then configured drivers, then all others.

    Within both groups, drivers that are ready to use come first.
    """
    brought = [each.name for each in extensions.find_extensions(extensions.DRIVERS)]
    names = sorted({*DRIVERS, *brought, *ws.config.drivers} - {LOCAL})
    found = [_describe_driver(ws, name) for name in names]
    found.sort(key=lambda each: (not each["configured"], bool(each["lacks"])))
    here = {"name": LOCAL, "configured": False, "priced": False, "lacks": ""}
    return [here, *found]


def _describe_driver(ws: Workspace, name: str) -> Facts:
    try:
        driver = create_driver(name, ws.config.driver(name), (), str(ws.home))
        priced, lacks = driver.traits.priced or driver.traits.billed, driver.find_lack()
    except RecipeError as error:
        priced, lacks = False, str(error)
    return {
        "name": name,
        "configured": name in ws.config.drivers,
        "priced": priced,
        "lacks": lacks,
    }
