"""Integrity checks for single checkpoint files, without unpickling.

Files of unknown types only have to be non-empty. A flipped bit inside a safetensors file is found
only if a digest was recorded.
"""

from __future__ import annotations

import json
import os
import pickletools
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from zipfile import ZipFile, ZipInfo

ARCHIVES = (".pt", ".pth", ".ckpt", ".pkl", ".distcp")
"""Suffixes of torch.save files (zip archives). Plain pickles also use these suffixes."""
TORCH_BINS = (
    "pytorch_model",
    "adapter_model",
    "diffusion_pytorch_model",
    "optimizer",
    "scheduler",
    "sampler",
    "dl_state_dict",
    "training_args",
)
"""Name prefixes of `.bin` files from torch.save. Other `.bin` files can have any format."""
HEADER = 100 << 20
"""Maximum size of a safetensors header in bytes, as in the reference implementation."""
GLANCE = 1 << 20
"""Maximum size of a JSON file to parse in a quick check, in bytes."""
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_MEMBER = b"PK\x03\x04"  # begins each member of a zip archive
_END_LENGTH = 22  # bytes of the end record of a zip archive without a comment
_CONSTANTS = frozenset(
    {
        "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4",
    }
)  # fmt: skip
"""Pickle operations that push a string or an integer."""


def flaw(path: Path, *, thorough: bool = False) -> str:
    """Describe the damage of a checkpoint file; return "" if none is found.

    With `thorough`, also verify checksums and parse all JSON.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            # A link may point to a directory.
            return "" if stat.S_ISDIR(found.st_mode) else "is neither a file nor a directory"
        size = found.st_size
        if size == 0:
            is_never_empty = path.suffix in (*ARCHIVES, ".safetensors", ".json", ".npz")
            return "is empty" if is_never_empty or _is_torch_bin(path) else ""
        if path.suffix == ".safetensors":
            return _safetensors(path, size)
        if path.suffix == ".json":
            return _json(path, size, thorough=thorough)
        if path.suffix == ".jsonl":
            return _lines(path, size)
        if path.suffix in (*ARCHIVES, ".npz") or _is_torch_bin(path):
            return _archive(path, size, thorough=thorough)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def read_shard_sizes(metadata: Path) -> dict[str, int]:
    """Return the minimum size of each shard listed in a torch distributed `.metadata` file.

    Sizes are in bytes. Raises ValueError for a truncated file.
    """
    ends: dict[str, int] = {}
    with metadata.open("rb") as file:
        words = list(_atoms(file))
    for at in range(len(words) - 5):
        name, offset, length = words[at + 1], words[at + 3], words[at + 5]
        named = (words[at], words[at + 2], words[at + 4]) == ("relative_path", "offset", "length")
        if named and isinstance(name, str) and isinstance(offset, int) and isinstance(length, int):
            ends[name] = max(ends.get(name, 0), offset + length)
    return ends


def _is_torch_bin(path: Path) -> bool:
    return path.suffix == ".bin" and path.name.startswith(TORCH_BINS)


def _safetensors(path: Path, size: int) -> str:
    """Describe the damage of a safetensors file, or return "".

    The format is 8 bytes of header length, a JSON header, then contiguous tensors.
    """
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > size - 8:
            return "is cut off in its header"
        if head > HEADER:
            return "has no safetensors header"
        try:
            table = json.loads(file.read(head))
            spans = sorted(_span(entry) for name, entry in table.items() if name != "__metadata__")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return "has a damaged header"
    at = 0
    for begin, end in spans:
        if begin != at:
            return "has a damaged header"
        at = end
    if size != 8 + head + at:
        return f"has {size} bytes, but its header says {8 + head + at}"
    return ""


def _span(entry: dict[str, object]) -> tuple[int, int]:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError
    begin, end = (int(offset) for offset in offsets)
    bits = BITS.get(str(entry["dtype"]))
    for extent in shape:
        bits = bits * int(extent) if bits is not None else None
    if not 0 <= begin <= end or (bits is not None and -(-bits // 8) != end - begin):
        raise ValueError
    return begin, end


def _json(path: Path, size: int, *, thorough: bool) -> str:
    if size > GLANCE and not thorough:
        with path.open("rb") as file:
            file.seek(-64, os.SEEK_END)
            return "" if file.read().rstrip()[-1:] in (b"}", b"]") else "is cut off"
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "is incomplete JSON"
    return ""


def _lines(path: Path, size: int) -> str:
    """Describe a truncated last line of a JSON Lines file, or return ""."""
    with path.open("rb") as file:
        file.seek(max(0, size - GLANCE))
        end = file.read()
    last = end[end.rfind(b"\n") + 1 :]
    if not last or (len(last) == GLANCE):
        return ""
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return "is cut off in its last line"
    return ""


def _archive(path: Path, size: int, *, thorough: bool) -> str:
    """Describe the damage of a torch.save file or a numpy archive, or return ""."""
    from zipfile import BadZipFile

    with path.open("rb") as file:
        if file.read(4) != _MEMBER:
            if _is_whole_pickle(file, size):
                return ""
            return "is neither a complete zip archive nor a complete pickle"
        file.seek(max(0, size - _END_LENGTH))
        end = file.read()
        try:
            archive = _open_archive(file, end)
        except (BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError):
            return "is a zip archive that is cut off or damaged"
        members = archive.infolist()
        first_offset = min((member.header_offset for member in members), default=0)
        # torch distributed writes several archives into one file.
        if path.suffix != ".distcp" and first_offset:
            return "is a zip archive with something before it"
        for member in members:
            if not _has_header(file, member):
                return "is a zip archive whose directory is wrong"
            if thorough and not _is_intact(archive, member):
                return "is a zip archive with a damaged member"
    return ""


def _open_archive(file: BinaryIO, end: bytes) -> ZipFile:
    """Open a zip archive whose last bytes are `end`, and check its directory.

    Raises BadZipFile, and other errors of the `zipfile` module for damaged archives.
    """
    from zipfile import BadZipFile, ZipFile

    # `zipfile` also finds an end record with something after it.
    if not end.startswith(b"PK\x05\x06") or end[20:] != b"\0\0":
        raise BadZipFile
    archive = ZipFile(file)
    members = archive.infolist()
    for member in members:
        if not 0 <= member.header_offset <= archive.start_dir - member.compress_size:
            raise BadZipFile
    # 0xFFFF: the count is in the zip64 record.
    if struct.unpack("<H", end[10:12])[0] not in (len(members), 0xFFFF):
        raise BadZipFile
    return archive


def _has_header(file: BinaryIO, member: ZipInfo) -> bool:
    """Return True if a member's own header is at the place that the archive's directory says."""
    file.seek(member.header_offset)
    header = file.read(30)
    return len(header) == 30 and header.startswith(_MEMBER)


def _is_intact(archive: ZipFile, member: ZipInfo) -> bool:
    """Return True if the bytes of a member match its checksum."""
    from zipfile import BadZipFile

    # torch can be configured to write no checksums. All of them are zero then.
    if not member.CRC:
        return True
    try:
        with archive.open(member) as data:
            while data.read(1 << 20):
                pass
    except (BadZipFile, zlib.error, ValueError, RuntimeError, EOFError, struct.error):
        return False
    return True


def _is_whole_pickle(file: BinaryIO, size: int) -> bool:
    """Return True if the file is one complete pickle, reading opcodes without executing them."""
    file.seek(0)
    try:
        for operation, _, _ in pickletools.genops(file):
            if operation.name == "STOP":
                return file.tell() == size
    except (ValueError, IndexError, EOFError, OverflowError):
        pass
    return False


def _atoms(file: BinaryIO) -> Iterator[str | int]:
    """Yield the strings and integers of a pickle in order, including repeated references.

    Raises ValueError for a truncated pickle.
    """
    memo: dict[int, str | int | None] = {}
    last: str | int | None = None
    try:
        for operation, value, _ in pickletools.genops(file):
            name = operation.name
            if name == "MEMOIZE":
                memo[len(memo)] = last
                continue
            if name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[int(value or 0)] = last
                continue
            last = None
            if name in ("GET", "BINGET", "LONG_BINGET"):
                last = memo.get(int(value or 0))
            # "I01" and "I00" are booleans.
            elif name in _CONSTANTS and type(value) in (str, int):
                last = value
            if last is not None:
                yield last
    except (IndexError, EOFError, OverflowError) as error:
        raise ValueError(str(error)) from error
