"""Downloads of objects from a bucket by temporary signed URLs, hashed while they arrive.

partial/SENDER/NAME/boot  the boot in which the download began; older data may be incomplete
partial/SENDER/NAME/it    the file or directory

URLs are secrets. Messages of libraries, which may contain URLs, are never passed on, and redirects
are not followed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import threading

from . import objects, sparse, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from http.client import HTTPResponse
    from urllib.request import OpenerDirector

    from .request import AgentRequest

WIDTH = 16
"""Number of concurrent downloads."""
TRIES = 6
"""Number of consecutive attempts without new data before a download fails."""
SILENCE = 20.0
"""Seconds without data after which a connection counts as broken."""
TICK = 0.5
"""Seconds between progress messages."""
FAREWELL = 2.0
"""Seconds to wait for cancelled threads. They write nothing afterwards."""
PASSING = (408, 429, 500, 502, 503, 504)
"""HTTP status codes of temporary errors, after which the download is retried."""


class PullRefused(Exception):
    """An object is unavailable or has unexpected content. The message contains no URL."""


def pull(
    request: AgentRequest, name: str, items: Sequence[tuple[str, int, str, str]], needed: int
) -> None:
    """Download items: path in the directory (empty for a single file), size, ETag if known, and
    URL.

    Sends lines of JSON: `["bytes", COUNT]` as progress, `["file", PATH, SHA-256]` for each file,
    and `["problem", WORDS]`. If fewer than `needed` bytes are available, including existing files,
    only `["full", FREE]` is sent. Partial files are hashed and continued.
    """
    folder = f"{request.partial}/{name}"
    request.make_arriving(folder)
    _delete_stale(folder, request.boot)
    free = objects.free(request)
    if (
        needed
        - sum(
            os.lstat(f"{folder}/it/{path}" if path else f"{folder}/it").st_size
            for path in _list_arrived(folder)
        )
        > free
    ):
        _send_message(request, "full", free)
        return
    width = min(WIDTH, len(items))
    pulling = PullState(f"{folder}/it", items, width)
    threads = [threading.Thread(target=pulling.work, daemon=True) for _ in range(width)]
    try:
        for thread in threads:
            thread.start()
        while pulling.working:
            pulling.news.wait(TICK)
            request.check()
            request.make_arriving(request.partial)  # mark the sender as alive
            for words in pulling.fresh_lines():
                _send_message(request, *words)
    finally:
        pulling.over.set()
        for thread in threads:
            thread.join(FAREWELL)
    for words in pulling.fresh_lines():
        _send_message(request, *words)
    if pulling.failed is not None:
        raise pulling.failed
    if pulling.problem:
        _send_message(request, "problem", pulling.problem)


def settle(request: AgentRequest, pulled: str, name: str, stamp: str) -> bool:
    """Convert a download to the object `name`.

    Returns False if names and kinds do not match `stamp`. Raises ObjectGone.
    """
    here, came = f"{request.partial}/{name}", f"{request.partial}/{pulled}"
    if os.path.lexists(f"{came}/it"):
        trees.remove(here)
        os.rename(f"{came}/it", here)
    trees.remove(came)
    return (
        objects.place_tree(request, name, stamp, True)
        if stamp
        else bool(objects.place_files(request, [name]))
    )


class PullState:
    """The state shared by download threads."""

    def __init__(self, top: str, items: Sequence[tuple[str, int, str, str]], working: int) -> None:
        self.over, self.news = threading.Event(), threading.Event()
        self.working = working
        """Number of running threads."""
        self.problem = ""
        self.failed: OSError | None = None  # disk error
        self._top, self._items = top, iter(items)
        self._lock = threading.Lock()
        self._lines: list[tuple[object, ...]] = []
        self._bytes, self._last = 0, -1
        self._any = False

    def fresh_lines(self) -> Iterator[tuple[object, ...]]:
        """Yield the messages of the download threads since the last call."""
        self.news.clear()
        with self._lock:
            lines, self._lines = self._lines, []
        # Also without new data, because only sending reveals a disconnected client.
        if self._last != self._bytes or not lines:
            self._last = self._bytes
            lines.append(("bytes", self._last))
        yield from lines

    def work(self) -> None:
        """Download files until none are left or one fails."""
        opener = _opener()
        view = memoryview(bytearray(trees.BLOCK))
        try:
            while not self.over.is_set():
                with self._lock:
                    item = next(self._items, None)
                if item is None:
                    return
                digest = self._download(opener, view, *item)
                if not self.over.is_set():
                    with self._lock:
                        self._lines.append(("file", item[0], digest))
                    self.news.set()
        except Exception as error:
            with self._lock:
                if not self.over.is_set():
                    self.failed = error if isinstance(error, OSError) else None
                    self.problem = (
                        str(error) if isinstance(error, PullRefused) else type(error).__name__
                    )
            self.over.set()
        finally:
            with self._lock:
                self.working -= 1
            self.news.set()

    def _download(
        self,
        opener: OpenerDirector,
        view: memoryview,
        path: str,
        size: int,
        etag: str,
        address: str,
    ) -> str:
        at = f"{self._top}/{path}" if path else self._top
        os.makedirs(os.path.dirname(at), exist_ok=True)
        fd = os.open(at, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # A cancelled request may still be writing to the file.
            fcntl.flock(fd, fcntl.LOCK_EX)
            file = PartialFile(fd, size, self._count)
            if os.fstat(fd).st_size > size:
                os.ftruncate(fd, 0)
            while not self.over.is_set() and file.hash_next(view):
                pass
            self._download_rest(file, opener, view, etag, address)
        finally:
            os.close(fd)
        return file.hasher.hexdigest()

    def _download_rest(
        self, file: PartialFile, opener: OpenerDirector, view: memoryview, etag: str, address: str
    ) -> None:
        """Request the missing bytes of a file until it is complete.  Raises PullRefused."""
        tries, most = 0, file.have
        while file.have < file.size and not self.over.is_set():
            words, answer = _request_object(opener, address, file.have, etag)
            if answer is not None:
                with answer:
                    words = self._receive(file, answer, view)
            if file.have == file.size:
                file.extend()
                break
            if file.have > most:
                tries, most = 0, file.have
            else:
                tries += 1
            # Without a byte of any file so far, the bucket is probably out of reach: fail sooner.
            self._any = self._any or most > 0
            if tries >= (TRIES if self._any else 2):
                raise PullRefused(words)
            self.over.wait(min(5.0, 0.1 * 2**tries))

    def _receive(self, file: PartialFile, answer: HTTPResponse, view: memoryview) -> str:
        """Append the bytes of an answer to a file, and return why there are no more."""
        if file.have and answer.status != 206:  # the server ignores ranges
            file.restart()
        if answer.length is not None and answer.length != file.size - file.have:
            raise PullRefused(
                f"the object has {file.have + answer.length} bytes in the bucket, but {file.size} were expected"
            )
        words, got = _read(answer, view)
        while got and not self.over.is_set():
            if file.have + got > file.size:
                raise PullRefused(f"the bucket sent more than the expected {file.size} bytes")
            file.append(view[:got])
            words, got = _read(answer, view)
        return words

    def _count(self, size: int) -> None:
        with self._lock:
            self._bytes += size


class PartialFile:
    """A file that is being downloaded, with the number and the hash of its bytes so far.

    `count` is called with the number of added bytes.
    """

    def __init__(self, fd: int, size: int, count: Callable[[int], None]) -> None:
        self.size = size
        self.have = 0
        self.hasher = hashlib.sha256()
        self._fd = fd
        self._count = count

    def hash_next(self, view: memoryview) -> int:
        """Hash the next bytes that an earlier download left, and return their number."""
        got = os.readv(self._fd, [view])
        self._add(view[:got])
        return got

    def append(self, data: memoryview) -> None:
        sparse.write(self._fd, data)
        self._add(data)

    def restart(self) -> None:
        """Delete all bytes."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._count(-self.have)
        self.hasher, self.have = hashlib.sha256(), 0

    def extend(self) -> None:
        """Extend the file to its size if it ends with a hole."""
        sparse.extend(self._fd, self.size)

    def _add(self, data: memoryview) -> None:
        self.hasher.update(data)
        self.have += len(data)
        self._count(len(data))


def _delete_stale(folder: str, boot: str) -> None:
    """Delete partial downloads of an earlier boot."""
    try:
        with open(f"{folder}/boot", encoding="utf-8") as file:
            if file.read() == boot:
                return
    except FileNotFoundError:
        pass
    trees.remove(f"{folder}/it")
    with open(f"{folder}/boot", "w", encoding="utf-8") as file:
        file.write(boot)


def _list_arrived(folder: str) -> list[str]:
    """Return the paths of complete and partial files. The path of a single file is empty."""
    if os.path.isdir(f"{folder}/it"):
        return [path for path, kind in trees.below(f"{folder}/it") if kind == "f"]
    return [""] if os.path.lexists(f"{folder}/it") else []


def _send_message(request: AgentRequest, *words: object) -> None:
    request.emit(json.dumps(words).encode() + b"\n")
    request.flush()


def _opener() -> OpenerDirector:
    """Return a URL opener for http and https that uses the user's proxies and follows no redirects."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        request.HTTPDefaultErrorHandler,
        request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _request_object(
    opener: OpenerDirector, address: str, start: int, etag: str
) -> tuple[str, HTTPResponse | None]:
    """Request an object from byte `start`.

    Return the response, or a message if the request may be retried.

    Raises PullRefused if a retry is useless.
    """
    from http.client import HTTPException
    from urllib import error, request

    if not address.startswith(("http://", "https://")):
        raise PullRefused("the signed URL is not an http or https URL")
    try:
        asked = request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310  (the opener supports only http and https)
        answer = opener.open(asked, timeout=SILENCE)
    except error.HTTPError as refused:
        refused.close()
        words = f"the bucket returned HTTP status {refused.code}"
        if refused.code not in PASSING:
            raise PullRefused(words) from None
        return words, None
    except (OSError, HTTPException, ValueError) as broken:
        return _words(broken), None
    try:
        if etag and answer.headers.get("ETag", etag) != etag:
            raise PullRefused("the object changed in the meantime")
        if answer.status not in (200, 206) or (
            answer.status == 206
            and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        ):
            raise PullRefused("the bucket sent an unexpected response")
    except PullRefused:
        answer.close()
        raise
    return "", answer


def _read(answer: HTTPResponse, view: memoryview) -> tuple[str, int]:
    """Read bytes into `view`.

    Return a message for an early end, and the number of bytes, 0 at the end.
    """
    from http.client import HTTPException

    try:
        got = answer.readinto(view)
        return "the bucket sent less data than expected", got
    except (OSError, HTTPException, ValueError) as broken:
        return _words(broken), 0


def _words(error: Exception) -> str:
    """Return a message for a connection error, without the URL."""
    why = getattr(error, "reason", error)
    if isinstance(why, socket.gaierror):
        return "the host cannot resolve the bucket's host name"
    if isinstance(why, socket.timeout):
        return "the bucket does not respond to the host"
    number = getattr(why, "errno", None)
    words = (
        os.strerror(number)
        if isinstance(number, int) and type(why).__module__ == "builtins"
        else type(why).__name__
    )
    return f"the host cannot connect to the bucket ({words})"
