"""Log records of recipe itself, for operators and developers, with the logger names `recipe.<room>`
and `drivers.<name>`.

`logging` is only imported if logs are requested, or if it is already imported. Otherwise a record
costs one lookup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from .errors import NotFound
from .secrets import Masker

if TYPE_CHECKING:
    import logging

ROOTS: Final = ("recipe", "drivers")
REMOTE: Final = "training.remote"
"""Logger room for events of runs on other machines."""
EVENT: Final = "recipe_event"
"""Record attribute with the fields of an event."""
LEVELS: Final = ("debug", "info", "warning", "error")
_INFO: Final = 20
"""`logging.INFO`, known without the import."""

_maskers: list[Masker] = []
_writers: list[Callable[[str], None]] = []


class Log:
    """Logger named `recipe.<room>`. Arguments are formatted only if the record is logged."""

    def __init__(self, room: str) -> None:
        self._name = f"recipe.{room}"

    def info(self, text: str, *arguments: object) -> None:
        self._record("info", text, arguments)

    def warning(self, text: str, *arguments: object) -> None:
        self._record("warning", text, arguments)

    def error(self, text: str, *arguments: object) -> None:
        self._record("error", text, arguments)

    def debug(self, text: str, *arguments: object) -> None:
        self._record("debug", text, arguments)

    def event(self, name: str, **facts: object) -> None:
        """Log an event with its fields, for log readers, as `ROOM.NAME`."""
        logger = self._logger()
        if logger is not None:
            room = self._name.removeprefix("recipe.")
            event = {"event": f"{room}.{name}", **facts}
            words = " ".join(f"{key}={value}" for key, value in facts.items())
            logger.info("%s %s", name, words, extra={EVENT: event})

    @property
    def wanted(self) -> bool:
        """Whether INFO records are read, so that callers can skip expensive arguments."""
        logger = self._logger()
        return logger is not None and logger.isEnabledFor(_INFO)

    def _record(self, level: str, text: str, arguments: tuple[object, ...]) -> None:
        logger = self._logger()
        if logger is not None:
            getattr(logger, level)(text, *arguments)

    def _logger(self) -> logging.Logger | None:
        """Return the logger of the room; None if nothing has imported `logging`."""
        module = sys.modules.get("logging")
        # Another thread may just be importing it.
        if module is None or not hasattr(module, "getLogger"):
            return None
        logger: logging.Logger = module.getLogger(self._name)
        return logger


def mask(masker: Masker) -> None:
    """Mask these secrets in all future log records."""
    _maskers.append(masker)


@contextmanager
def redirect_lines(write: Callable[[str], None] | None) -> Iterator[None]:
    """Redirect stderr log lines to `write` inside the context, from any thread."""
    if write is not None:
        _writers.append(write)
    try:
        yield
    finally:
        if write is not None:
            _writers.remove(write)


def begin(verbose: int, wish: str) -> None:
    """Write records to stderr (`verbose` 1: INFO, 2: DEBUG), and as in `wish`: LEVEL or LEVEL:FILE.

    Raises NotFound for an unknown level.

    Lines on stderr are text. Lines in the file are JSON objects, including records of other
    libraries from INFO on.
    """
    import logging

    level, _, path = wish.partition(":")
    if wish and level.lower() not in LEVELS:
        raise NotFound(
            f'RECIPE_LOG: unknown level "{level}"',
            fix=f"use {', '.join(LEVELS)}, optionally followed by a colon and a file",
        )
    wanted = logging.getLevelName(level.upper()) if wish else logging.WARNING
    shown = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    handlers: list[tuple[logging.Handler, int]] = []
    root = logging.getLogger()
    if path:
        file = logging.FileHandler(path, encoding="utf-8")
        file.setFormatter(_json())
        handlers.append((file, wanted))
        for earlier in list(root.handlers):
            if isinstance(earlier, logging.FileHandler):
                root.removeHandler(earlier)
        # Without a handler, warnings would go to stderr, so keep that behavior.
        if logging.lastResort is not None and not root.handlers:
            root.addHandler(logging.lastResort)
        root.addHandler(file)
        root.setLevel(max(wanted, logging.INFO))
    else:
        shown = min(shown, wanted)
    if verbose or (wish and not path):
        handlers.append((_stderr(), shown))
    for name in ROOTS:
        logger = logging.getLogger(name)
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        logger.setLevel(min(level for _, level in handlers))
        logger.propagate = False
        for handler, at in handlers:
            handler.setLevel(at)
            handler.addFilter(_mask_record)
            logger.addHandler(handler)


def _stderr() -> logging.Handler:
    import logging

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = self.format(record)
            if _writers:
                _writers[-1](line)
            else:
                print(line, file=sys.stderr, flush=True)

    lines = Lines()
    lines.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    return lines


def _json() -> logging.Formatter:
    """Return a log formatter that writes each record, with its event fields, as a JSON line."""
    import logging

    class Json(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            facts = {
                "at": at.replace("+00:00", "Z"),
                "level": record.levelname.lower(),
                "logger": record.name,
            }
            event = getattr(record, EVENT, None)
            return json.dumps(facts | (event or {"message": record.getMessage()}), default=str)

    return Json()


def _mask_record(record: Any) -> bool:
    """Mask secrets in a record and its traceback. Always returns True."""
    text = record.getMessage()
    if record.exc_info:
        import traceback

        text += "\n" + "".join(traceback.format_exception(*record.exc_info))
    for masker in _maskers:
        text = masker.text(text)
    if event := getattr(record, EVENT, None):
        for masker in _maskers:
            event = masker.value(event)
        setattr(record, EVENT, event)
    record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
    return True
