"""Put together the small sh programs that a depot has a host run, and read their answers.  Knows sh, names and manifests, not hosts.

Every program answers `<word> <sha256>` and then bytes with that digest: noise of a login shell, a lost end and a flipped bit are told from an answer.
Names travel as lists with a zero byte behind each, and only on stdin.  What is asked of a host: POSIX sh, coreutils, find, xargs -0, sort -z, tar.
Nothing here touches a disk or a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..storage.files import Entry

LONGEST_ANSWER = 256 << 20
"""Bytes; a host that says more than this is not listened to."""
HEX = frozenset("0123456789abcdef")
SUFFIX = {"f": "", "x": ".x", "t": ".t"}


class Garbled(Exception):
    """An answer that did not arrive whole.  It is asked for again."""


class Seen(NamedTuple):
    """What a host says lies at one output: `kind` is f, x, d (a folder), - (nothing) or o (something else)."""

    kind: str
    entries: tuple[Entry, ...] = ()


def name_of(content: str) -> str:
    """The file name of an object."""
    return content[2:] + SUFFIX[content[0]]


def place_of(content: str) -> str:
    """Where an object lies, from the root."""
    return f"objects/{content[2:4]}/{name_of(content)}"


def lines(texts: Iterable[str]) -> bytes:
    """Texts without line ends, for a program that reads lines."""
    return "".join(f"{text}\n" for text in texts).encode()


def names(texts: Iterable[str]) -> bytes:
    """A list of names as programs read it."""
    data = "\0".join(texts).encode("utf-8", "surrogateescape")
    return data + b"\0" if data else b""


def tree_digest(entries: Sequence[Entry]) -> str:
    """What `check` answers for a tree of exactly these names, kinds and links."""
    records = {b"d."}
    links = []
    for entry in entries:
        name = _encode(entry.path)
        records.add(entry.kind.encode() + b"./" + name)
        while (at := name.rfind(b"/")) > 0:
            name = name[:at]
            record = b"d./" + name
            if record in records:
                break
            records.add(record)
        if entry.kind == "l":
            links.append((_encode(entry.path), _encode(entry.value)))
    hasher = hashlib.sha256(b"".join(record + b"\0" for record in sorted(records)))
    for _, target in sorted(links):
        hasher.update(target + b"\n\0")
    return hasher.hexdigest()


def bytes_digest(entries: Iterable[Entry]) -> str:
    """What `sums` answers for these files, in this order."""
    return hashlib.sha256(b"".join(entry.value.encode() + b"\n" for entry in entries)).hexdigest()


def free_of(line: bytes) -> int:
    """Bytes, from a line of `df -Pk`."""
    fields = line.split()
    numbers = [int(field) for field in fields if field.isdigit()]
    if len(numbers) < 3:
        raise Garbled
    return numbers[2] << 10


def answer(received: bytes, word: str) -> bytes:
    """What a program said, behind whatever a login shell printed first.  Raises Garbled when it is not whole."""
    mark = f"\n{word} ".encode()
    at = received.find(mark)
    digest, newline, body = received[at + len(mark) :].partition(b"\n") if at >= 0 else (b"", b"", b"")
    if not newline or hashlib.sha256(body).hexdigest().encode() != digest:
        raise Garbled
    return body


def seen(body: bytes, count: int) -> tuple[list[Seen], list[str]]:
    """What `TAKE` said of `count` outputs: what each is, and the names of what the attempt was given and is not so any more."""
    records = iter(body.split(b"\0")[:-1])
    found = []
    try:
        for _ in range(count):
            kind = next(records).decode()
            if kind == "d":
                below = _below(records)
                links = [_decode(target[:-1]) for target in iter(lambda: next(records), b"/")]
            else:
                below, links = [(kind, "")], []
            if kind not in ("-", "o", "f", "x", "d"):
                raise Garbled
            if kind in "-o":
                found.append(Seen(kind))
                continue
            sizes, digests = (next(records).split(b"\n")[:-1] for _ in range(2))
            plain = sorted(((name, kind) for kind, name in below if kind in "fx"), key=lambda pair: _encode(pair[0]))
            if len(sizes) != len(plain) or len(digests) != len(plain):
                raise Garbled
            entries = [Entry(name, kind, int(size), digest.decode()) for (name, kind), size, digest in zip(plain, sizes, digests, strict=True)]
            pointing = sorted((name for kind, name in below if kind == "l"), key=_encode)
            entries += [Entry(name, "l", len(_encode(target)), target) for name, target in zip(pointing, links, strict=True)]
            entries += [Entry(name, kind, 0, "") for kind, name in _empty(below)]
            found.append(Seen(kind, tuple(sorted(entries, key=lambda entry: _encode(entry.path)))))
        return found, [_decode(record) for record in records]
    except (StopIteration, RuntimeError, ValueError, IndexError) as error:
        raise Garbled from error


def remains(body: bytes) -> tuple[dict[str, bytes], int]:
    """What `REMAINS` said: files by name, and how many others there are.  Raises Garbled when it makes no sense, or names what lies outside."""
    try:
        count, _, rest = body.partition(b"\n")
        found: dict[str, bytes] = {}
        while rest:
            name, _, rest = rest.partition(b"\n")
            size, _, rest = rest.partition(b"\n")
            found[_decode(name[2:])], rest = rest[: int(size)], rest[int(size) :]
        entries = [Entry(name, "f", len(data), hashlib.sha256(data).hexdigest()) for name, data in found.items()]
        others = int(count) - len(found)
    except ValueError as error:
        raise Garbled from error
    if untrusted(entries):
        raise Garbled
    return found, max(0, others)


def folders(manifest: Iterable[Entry]) -> list[str]:
    """Every folder of a tree, each after the one it lies in."""
    found: dict[str, None] = {}
    for path, kind, _, _ in manifest:
        folder = path if kind == "d" else path.rpartition("/")[0]
        if folder in found or not folder:
            continue
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            found["/".join(parts[:depth])] = None
    return list(found)


def untrusted(entries: Sequence[Entry]) -> str:
    """What is wrong with a manifest that a host has told, in words; empty when it may be made here."""
    kinds = {entry.path: entry.kind for entry in entries}
    if len(kinds) != len(entries):
        return "a name comes twice"
    targets = {entry.path: entry.value for entry in entries if entry.kind == "l"}
    for path, kind, size, value in entries:
        parts = path.split("/")
        if "\0" in path or any(part in ("", ".", "..") or len(_encode(part)) > 255 for part in parts):
            return f"{path!r} is no name of a file"
        if kind == "o":
            return f"{path!r} is neither a file nor a folder"
        if any("/".join(parts[:depth]) in kinds for depth in range(1, len(parts))):
            return f"{path!r} lies below what is no folder"
        if kind in "fx" and (size < 0 or len(value) != 64 or not HEX.issuperset(value)):
            return f"{path!r} has no digest"
        if kind == "l" and _leads_out(path, targets):
            return f"a link to {value!r} leads out of it: {path!r}"
    return ""


def _leads_out(path: str, targets: Mapping[str, str]) -> bool:
    """Whether a link leaves its tree, through other links of it or not, or leads nowhere but round."""
    rest = path.split("/")
    at: list[str] = []
    followed = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            if not at:
                return True
            at.pop()
        elif part not in ("", "."):
            at.append(part)
            target = targets.get("/".join(at))
            if target is not None:
                followed += 1
                if target.startswith("/") or "\0" in target or not target or followed > 40:
                    return True
                at.pop()
                rest = target.split("/") + rest
    return False


def listing(body: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """What `LIST` said: the kind of everything below a folder, by name, and where links point."""
    records = iter(body.split(b"\0")[:-1])
    try:
        below = {name: kind for kind, name in _below(records) if name}
        pointing = sorted((name for name, kind in below.items() if kind == "l"), key=_encode)
        return below, dict(zip(pointing, (_decode(record[:-1]) for record in records), strict=True))
    except (StopIteration, RuntimeError, ValueError, IndexError) as error:
        raise Garbled from error


def _below(records: Iterator[bytes]) -> list[tuple[str, str]]:
    """Kinds and names, up to the end of a list."""
    found: list[tuple[str, str]] = []
    for record in records:
        if record == b"/":
            return found
        found.append((chr(record[0]), _decode(record[3:])))  # behind the kind, "./", or "." for the top
    raise Garbled


def _empty(below: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Empty folders, and what nobody can hash."""
    parents = {name.rpartition("/")[0] for _, name in below}
    return [(kind, name) for kind, name in below if name and (kind == "o" or (kind == "d" and name not in parents))]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# -- programs ----------------------------------------------------------------------------------------------------------------------------------------

# Every program is given: the word that begins its answer, the root, who sends, the boot.  T is ours while it runs.
# H: a list of names -> a digest a line.  h: bytes -> a digest.  s: the same for a few, where starting costs more than hashing.
# L: what is below here, a kind and a name each.  K: where the links among it point.
_HEAD = r"""
export LC_ALL=C
umask 022
W=$1 R=$2 S=partial/$3 B=$4
shift 4
cd "$R" || exit 9
T=$R/partial/.$W.$$
[ ! -d "$S" ] || : >"$S/.alive"
K() {
  find . -type l -print0 | sort -z | xargs -0 sh -c 'for f; do readlink "$f"; printf "\0"; done' sh
}
shelf() {
  D=objects/${1%"${1#??}"}
}
sealed() {
  shelf "$1"
  [ -e "$D/$1" ] && [ -s "seals/$1" ] && read -r b <"seals/$1" && [ "$b" = "$B" ] || return 1
  if [ -d "$D/$1" ]; then
    [ -z "$(find "$D/$1" -newer "seals/$1" | head -n 1)" ]
  else
    [ ! "$D/$1" -nt "seals/$1" ]
  fi
}
seal() {
  echo "$B" >"seals/$1" && : >"used/$1" # half a seal is none
}
s() {
  if d=$(sha256sum 2>/dev/null); then echo "${d%% *}"; else h; fi
}
free() {
  find "$1" -type d -exec chmod u+rwx {} +
}
tidy() {
  [ -d "$S" ] || return 0
  rm -f "$S/.alive"
  rmdir "$S" 2>/dev/null || : >"$S/.alive"
}
words() {
  printf %s "$1" | tail -c 2000 | tr '\n' ' '
}
"""

_BATCHES = r"""
H() {
  xargs -0 sh -c '[ $# -gt 0 ] || exit 0
case "$*" in
*[\\]* | *"
"*) for f; do d=$(%s <"$f"); echo "${d%%%% *}"; done ;;
*) %s "$@" | cut -c1-64 ;;
esac' sh
}
h() {
  d=$(%s)
  echo "${d%%%% *}"
}
"""
_PYTHON = r"""
H() {
  python3 -c 'import hashlib, sys
for name in sys.stdin.buffer.read().split(b"\0")[:-1]:
    try:
        with open(name, "rb", 0) as file:
            hasher = hashlib.sha256()
            while data := file.read(1 << 20):
                hasher.update(data)
        print(hasher.hexdigest())
    except OSError:
        print("-")'
}
h() {
  python3 -c 'import hashlib, sys
hasher = hashlib.sha256()
while data := sys.stdin.buffer.read(1 << 20):
    hasher.update(data)
print(hasher.hexdigest())'
}
"""
_OPENSSL = "openssl dgst -sha256 -r"
HASHES: Mapping[str, str] = {
    "openssl": _BATCHES % (_OPENSSL, _OPENSSL, _OPENSSL),
    "python3": _PYTHON,
    "sha256sum": _BATCHES % ("sha256sum", "sha256sum", "sha256sum"),
}
"""Ways of hashing, the fastest first: what coreutils has does not use the processor's instructions for it."""

# What is said is kept until its digest is known: words in a variable, everything else in a file.
_WORDS = r"""
a=$(main "$@" && echo .) || exit 1
a=${a%.}
d=NOTHING
[ -z "$a" ] || d=$(printf %s "$a" | s)
printf '\n%s %s\n%s' "$W" "$d" "$a"
""".replace("NOTHING", hashlib.sha256().hexdigest())
_BYTES = r"""
main "$@" >"$T" || exit 1
printf '\n%s %s\n' "$W" "$(s <"$T")"
cat "$T"
"""
_CLEAN = r"""
trap 'rm -f "$T" "$T".?' EXIT
trap 'exit 1' HUP INT TERM PIPE
"""


_KINDS = {"d": "-type d", "l": "-type l", "x": "-type f -perm -0100", "f": "-type f", "o": ""}
_EACH = r"""-exec sh -c 'printf "%s%%s\0" "$@"' sh {} +"""  # without brackets around it: in those, busybox runs nothing
LISTS: Mapping[str, str] = {
    "printf": " -o ".join(f"{test} -printf '{kind}%p\\0'" for kind, test in _KINDS.items()),
    "exec": " -o ".join(f"{test} {_EACH % kind}" for kind, test in _KINDS.items()),
}
"""Ways of listing what is below a folder: with what GNU's find has, or with what all have."""


def program(hashes: str, lists: str, body: str) -> str:
    """A program whose `main` is `body`, on a host that hashes and lists in these ways."""
    look = f"L() {{\n  find . {LISTS[lists]} | sort -z\n}}\n"
    tail = _BYTES if body in _NOT_WORDS else _WORDS
    clean = _CLEAN if "$T" in body + tail else ""
    return f"{_HEAD}{clean}{look}{HASHES[hashes]}main() {{\n{body}\n}}\n{tail}"


# Root as it was said, the word -> where it is, how to hash, how to list, what is lacking, the boot; and their digest, hashed as they say.
OPENING = r"""
umask 077
case $1 in /*) ;; *) cd "${HOME:-.}" || exit 1 ;; esac
mkdir -p "$1" && cd "$1" && chmod 700 . && mkdir -p objects attempts partial seals used states || exit 1
known=PROBE
how=
for way in 'openssl dgst -sha256 -r' sha256sum; do
  case $(printf recipe | $way 2>/dev/null) in
  $known*) how=${way%% *} && break ;;
  esac
done
if [ "$how" != openssl ] && [ "$(python3 -c 'import hashlib; print(hashlib.sha256(b"recipe").hexdigest())' 2>/dev/null)" = $known ]; then
  how=python3
fi
lists=exec
[ "$(find . -maxdepth 0 -printf '%p\0x' 2>/dev/null | tr -d '\0')" != .x ] || lists=printf
for tool in tar find xargs sort dd readlink head tail cut; do
  command -v $tool >/dev/null || lacks="$lacks $tool"
done
[ -n "$how" ] || lacks="$lacks sha256sum"
boot=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || sysctl -n kern.boottime 2>/dev/null || echo unknown)
[ "$how" != python3 ] || way='python3 -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"'
said=$(printf '%s\n%s\n%s\n%s\n%s' "$(pwd -P)" "$how" "$lists" "$lacks" "$boot")
digest=$(printf %s "$said" | eval "${how:+$way}")
printf '\n%s\n%s\n%s\n%s\n' "$2" "$said" "${digest%% *}" "$2"
""".replace("PROBE", hashlib.sha256(b"recipe").hexdigest())

# names of objects -> those that may be used unread
HAVE = r"""
while read -r n; do
  sealed "$n" && : >"used/$n" && echo "$n"
done
return 0
"""

# names of objects -> how each stands; who has been silent; what is free; which trees there are, the latest first
BEGIN = r"""
mkdir -p "$S" && : >"$S/.alive" || return 1
while read -r n; do
  if sealed "$n"; then
    : >"used/$n" && echo "here $n"
  elif [ -e "$S/$n" ]; then
    echo "partial $n"
  elif [ -e "$D/$n" ]; then
    echo "doubtful $n"
  else
    echo "absent $n"
    for q in partial/*/"$n"; do
      [ -e "$q" ] && q=${q#partial/} && echo "theirs ${q%%/*} $n"
    done
  fi
done
echo silent
find partial -name .alive -mmin +10
echo free
df -Pk .
echo trees
ls -t used | head -n 100
return 0
"""

# another sender; names of objects: what it began is ours
ADOPT = r"""
while read -r n; do
  mv "partial/$1/$n" "$S/" 2>/dev/null && echo "$n"
done
rm -f "partial/$1/.alive"
rmdir "partial/$1" 2>/dev/null
return 0
"""

# an object that is not what its name says, to be put right
RETRACT = r"""
shelf "$1"
rm -f "seals/$1"
[ ! -d "$D/$1" ] || chmod u+rwx "$D/$1"
[ ! -e "$D/$1" ] || mv "$D/$1" "$S/" || return 1
[ ! -d "$S/$1" ] || free "$S/$1"
echo retracted
"""

# name, an older tree; what that has and the new one does not: the new one begins with the rest
BASE = r"""
[ ! -e "$S/$1" ] || { free "$S/$1" && rm -rf "$S/$1"; }
shelf "$2"
cp -al "$D/$2" "$S/$1" 2>/dev/null &
sealed "$2" && wait "$!" || { wait; free "$S/$1"; rm -rf "$S/$1"; echo cannot; return 0; }
cd "$S/$1" && free . || return 1
xargs -0 sh -c '[ $# -eq 0 ] || rm -rf "$@"' sh
echo linked
"""

# bytes that a file must have more than, bytes of a sample, which samples -> latest files there, each with the digests of those samples of it
ALIKE = r"""
least=$1 size=$2 n=0
shift 2
ls -t used | head -n 200 | while read -r o; do
  case $o in *.t) continue ;; esac
  shelf "$o"
  [ -n "$(find "$D/$o" -type f -size +"$least"c 2>/dev/null)" ] || continue
  printf %s "$o"
  for at; do printf ' %s' "$(dd if="$D/$o" bs="$size" skip="$at" count=1 2>/dev/null | s)"; done
  echo
  n=$((n + 1))
  [ "$n" -lt 4 ] || break
done
return 0
"""

# tree, digest of its names and links, whether it has links, whether all of it came in order: it gets its name
_PLACE = r"""
place() {
  shelf "$1"
  cd "$R/$S/$1" 2>/dev/null || { echo gone; return 0; }
  [ "$({ L; [ "$3" = plain ] || K; } | h)" = "$2" ] || { echo differs; return 0; }
  [ "$4" = smooth ] || find . -type f -perm -0200 -exec chmod a-w {} +
  find . -type d ! -name . -exec chmod 0555 {} +
  cd "$R" && { [ -d "$D" ] || mkdir -p "$D"; } || return 1
  [ ! -f "$S/$1.json" ] || mv -f "$S/$1.json" "$D/"
  if e=$(mv "$S/$1" "$D/" 2>&1); then
    chmod 0555 "$D/$1"
    seal "$1" && echo "placed $1"
  elif [ -d "$D/$1" ]; then
    free "$S/$1"
    rm -rf "${S:?}/$1"
    echo "placed $1"
  else
    echo "$e" >&2
    return 1
  fi
  tidy
}
"""

PLACE_TREE = f"{_PLACE}place $1 $2 $3 $4"

# Where there is a python3, it takes what comes: hashed once and in passing, one process for any number of files.  Nothing is read before it is known
# to work: where it does not, what follows reads all.  What is wrong later is said, and is seen by the digest in any case.  A pipe holds 64 KiB, and
# whoever fills it and whoever empties it wake each other for each: a wider one spares a sixth of the time of both.
_WIDER = r"""
try:
    import fcntl
    fcntl.fcntl(0, 1031, 1 << 18) # F_SETPIPE_SZ
except (ImportError, OSError):
    pass
"""

# a tar -> the digest of its files' digests, in their order, but of the first, which lists the others
_UNPACK = (
    _WIDER
    + r"""
import hashlib, os, sys
source, view, total = open(0, "rb", 1 << 16), memoryview(bytearray(68 << 10)), hashlib.sha256() # what is more than the buffer takes goes past it
def made(name, make):
    try:
        return make()
    except FileExistsError:
        os.unlink(name)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(name), exist_ok=True)
    return make()
try:
    long, odd, listed = {}, 0, False
    while (head := source.read(odd + 512)[odd:]) and head[0]:
        kind, size = head[156:157], int(head[124:135], 8)
        odd = -size % 512
        if kind in (b"L", b"K"):
            long[kind] = source.read(size)[:-1]
            continue
        before, name = head[345:500].rstrip(b"\0"), head[:100].rstrip(b"\0")
        name = long.pop(b"L", before + b"/" + name if before else name)
        if kind == b"5":
            os.makedirs(name, exist_ok=True)
        elif kind == b"2":
            target = long.pop(b"K", head[157:257].rstrip(b"\0"))
            made(name, lambda: os.symlink(target, name))
        elif not listed:
            listed = True
            source.read(size)
        else:
            mode, hasher = int(head[100:107], 8) & 0o555, hashlib.sha256()
            file = made(name, lambda: os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            while size and (count := source.readinto1(view[:size])):
                size -= count
                hasher.update(view[:count])
                written = 0
                while written < count:
                    written += os.write(file, view[written:count])
            os.close(file)
            total.update(hasher.hexdigest().encode() + b"\n")
    print(total.hexdigest())
except (OSError, ValueError) as error:
    print("python3", error)
"""
)

# folder, name of the list that comes first, tree, digests of its bytes and names if it may get its name now; a tar -> digest of the files' digests
BATCH = (
    _PLACE
    + r"""
[ -d "$S/$1" ] || mkdir -p "$S/$1"
cd "$S/$1" || return 1
if ! d=$(python3 -ISc 'UNPACK' 2>/dev/null); then
  e=$(tar -xf - -o -m --no-same-permissions 2>&1) || echo "tar $(words "$e")"
  [ -f "$2" ] || return 0
  d=$(H <"$2" | h)
  xargs -0 chmod a-w <"$2" 2>/dev/null
  rm -f "$2"
fi
echo "$d"
[ ! -f "$2.json" ] || mv -f "$2.json" "$R/$S/$3.json"
[ "$d" != "$4" ] || place "$3" "$5" "$6" "$7"
""".replace("UNPACK", _UNPACK)
)

# file, bytes of a grain, bytes of the file, `part` while more is to come, grains that come; bytes, which are hashed with those around them -> digest
_POUR = (
    _WIDER
    + r"""
import hashlib, os, sys
name, grain, size, whole = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] != "part"
view, hasher, at = memoryview(bytearray(1 << 16)), hashlib.sha256(), 0
try:
    file = os.open(name, os.O_RDWR | os.O_CREAT, 0o644)
    def there(end):
        global at
        os.lseek(file, at, os.SEEK_SET)
        while at < end and (count := os.readv(file, [view[:end - at]])):
            hasher.update(view[:count])
            at += count
    for hole in sys.argv[5:]:
        first, count = map(int, hole.split("+"))
        if whole:
            there(first * grain)
        at, end = first * grain, min(size, (first + count) * grain)
        os.lseek(file, at, os.SEEK_SET)
        while at < end and (count := os.readv(0, [view[:end - at]])):
            at += count
            if whole:
                hasher.update(view[:count])
            written = 0
            while written < count:
                written += os.write(file, view[written:count])
    if whole:
        there(size)
        print(hasher.hexdigest())
except OSError as error:
    print("python3", error)
"""
)

# folder, file, bytes of a grain, bytes of the file, mode or `part` while more is to come, grains that come (first+count); bytes -> digest of the file
WRITE = r"""
mkdir -p "$1/${2%/*}" && cd "$1" || return 1
f=$2 m=$5
[ ! -e "$f" ] || chmod u+w "$f"
shift 2
if ! python3 -ISc 'POUR' "$f" "$@" 2>/dev/null; then
  bs=$1
  shift 3
  i=- at=0
  [ $# = 1 ] || { i=$T.b && cat >"$i"; } # of a pipe nobody can say how many bytes one read takes
  for hole; do
    if [ "$i" = - ]; then e=$(dd of="$f" bs="$bs" seek="${hole%+*}" conv=notrunc 2>&1)
    else e=$(dd if="$i" of="$f" bs="$bs" skip="$at" count="${hole#*+}" seek="${hole%+*}" conv=notrunc 2>&1)
    fi || echo "dd $(words "$e")"
    at=$((at + ${hole#*+}))
  done
  [ "$m" = part ] || h <"$f" || echo gone
fi
[ "$m" = part ] || chmod "$m" "$f" || echo gone
""".replace("POUR", _POUR)

# folder; files -> a letter for each, and a digest for each that is there
SURVEY = r"""
cd "$1" 2>/dev/null || { echo gone; return 0; }
rm -f ".$W-"* # lists of batches that were cut
: >"$T.e"
xargs -0 sh -c 'exec 3>>"$0"
for f; do
  if [ -L "$f" ] || [ ! -f "$f" ]; then printf -- -
  else
    printf "%s\0" "$f" >&3
    if [ -x "$f" ]; then printf x; else printf f; fi
  fi
done' "$T.e"
echo
H <"$T.e"
"""

_SUMS = r"""
import hashlib, os, sys
name, grain, copy, left = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4] or 1 << 62)
view = memoryview(bytearray(1 << 16))
with open(name, "rb", 0) as file, open(copy or os.devnull, "wb", 0) as other:
    left = min(left, os.fstat(file.fileno()).st_size)
    print(left)
    try:
        import fcntl
        fcntl.ioctl(other.fileno(), 0x40049409, file.fileno()) # FICLONE: some disks keep the same bytes once
        other.truncate(left)
        copy = ""
    except (ImportError, OSError):
        pass
    while left:
        hasher, end = hashlib.sha256(), max(0, left - grain)
        while left > end:
            count = file.readinto(view[:left - end])
            if not count:
                sys.exit(1)
            left -= count
            hasher.update(view[:count])
            written = 0
            while copy and written < count:
                written += other.write(view[written:count])
        print(hasher.hexdigest())
"""

# folder, file, bytes of a grain; an older file and how much of it: with that it begins if there is none -> its size, and a digest for every grain
CHUNKS = r"""
cd "$1" 2>/dev/null || { echo gone; return 0; }
from=$2 new=
if [ ! -e "$2" ] && [ -n "$4" ] && [ -f "$R/$4" ]; then
  from=$R/$4 new=$T.s
fi
[ -f "$from" ] && [ ! -L "$from" ] || { echo 0; return 0; }
if ! python3 -ISc 'SUMS' "$from" "$3" "$new" "$5" 2>/dev/null >"$T.c"; then
  [ -z "$new" ] || { head -c "$5" "$from" >"$new" && from=$new; } || { echo 0; return 0; }
  size=$(($(wc -c <"$from")))
  i=0
  {
    echo "$size"
    while [ $((i * $3)) -lt "$size" ]; do
      dd if="$from" bs="$3" skip="$i" count=1 2>/dev/null | h
      i=$((i + 1))
    done
  } >"$T.c"
fi
[ -z "$new" ] || { mkdir -p "./${2%/*}" && mv -f "$new" "$2"; } || { echo 0; return 0; }
cat "$T.c"
""".replace("SUMS", _SUMS)

# folder -> everything below, and where links point
LIST = r"""
cd "$1" 2>/dev/null || return 0
L
printf '/\0'
K
"""

# folder; names
DELETE = r"""
cd "$1" 2>/dev/null || return 0
xargs -0 sh -c '[ $# -eq 0 ] || rm -rf "$@"' sh
echo deleted
"""

# files: they get their names
PLACE_FILES = r"""
while read -r n; do
  shelf "$n"
  case $n in *.x) m=0555 ;; *) m=0444 ;; esac
  mkdir -p "$D" && chmod $m "$S/$n" && mv -f "$S/$n" "$D/" && seal "$n" && echo "$n"
done
tidy
"""

# objects that were found to be right where they lie
SEAL = r"""
while read -r n; do
  seal "$n" && echo "$n"
done
return 0
"""

# attempt, digest of the tar, digest of names and links or nothing where there are none, folders of state; a tar -> nothing if the attempt stands
STAGE = r"""
N=$1 sum=$2 digest=$3
shift 3
if [ -e "attempts/$N.in" ] && [ -d "attempts/$N" ]; then
  cat >/dev/null
  return 0
fi
A=$S/attempt.$$
mkdir -p "$A" "$@" && cd "$A" || return 1
e=$(cat 2>&1 >tar) || echo "cat $(words "$e")"
if [ "$(s <tar)" != "$sum" ]; then
  echo cut
elif ! e=$(tar -xf tar -o -m --no-same-permissions 2>&1); then
  echo "tar $(words "$e")"
elif [ -n "$digest" ] && [ "$(cd at && { L; K; } | h)" != "$digest" ]; then
  echo differs
else
  set -- "at/$N"
  for f in "$1".*; do
    [ "$f" = "$1.in" ] || set -- "$@" "$f"
  done
  [ ! -e "$R/attempts/$N" ] || rm -rf "$R/attempts/$N"
  mv "$@" "at/$N.in" "$R/attempts" || echo gone # what was given is named last: then all of it is there
fi
cd "$R"
rm -rf "$A" >/dev/null 2>&1 & # nobody waits for it
"""

# attempt's path; outputs -> for each what it is, what is below, sizes, digests; then what the attempt was given and is not so any more
TAKE = r"""
cd "$1" 2>/dev/null || { echo gone; return 0; }
A=$(pwd -P)
[ ! -f "$A.in" ] || : >"$A.out"
P=$(cd "$R" && pwd -P)
xargs -0 sh -c 'for f; do printf %s "$f" | tr "\n" "\001"; echo; done' sh >"$T.n"
while IFS= read -r p; do
  p=$(printf %s. "$p" | tr '\001' '\n')
  p=${p%.}
  cd "$A" || return 1
  d=$A
  case $p in
  */*) d=$(cd "${p%/*}" 2>/dev/null && pwd -P) || d=$A ;;
  esac
  case $d/ in
  "$A"/* | "$P"/states/*) ;;
  *)
    printf 'o\0' # behind a link that leads out
    continue
    ;;
  esac
  if [ -d "$p" ]; then
    printf 'd\0'
    cd "$p" || return 1
    L
    printf '/\0'
    K
    printf '/\0'
    find . -type f -print0 | sort -z >"$T.f"
  elif [ -f "$p" ]; then
    if [ -x "$p" ]; then printf 'x\0'; else printf 'f\0'; fi
    printf '%s\0' "$p" >"$T.f"
  else
    if [ -e "$p" ] || [ -L "$p" ]; then printf 'o\0'; else printf -- '-\0'; fi
    continue
  fi
  xargs -0 sh -c '[ $# -eq 0 ] || stat -L -c %s "$@" 2>/dev/null || for f; do wc -c <"$f"; done' sh <"$T.f"
  printf '\0'
  H <"$T.f"
  printf '\0'
done <"$T.n"
M=$A.in
cd "$A" && [ -f "$M" ] && xargs -0 sh -c 'for f; do
  if [ -d "$f" ]; then
    [ -z "$(find -L "$f/." -newer "$0" | head -n 1)" ] || printf "%s\0" "$f"
  elif [ ! -e "$f" ] || [ "$f" -nt "$0" ]; then printf "%s\0" "$f"
  fi
done' "$M" <"$M"
return 0
"""

# attempt's path, bytes that a file may have, bytes that all may, how many -> how many files it has; then of each small one its name, size and bytes
REMAINS = r"""
cd "$1" 2>/dev/null || { echo 0; return 0; }
all=0
echo $(($(find . -type f | wc -l)))
find . -type f ! -path "*
*" -size -"$(($2 + 1))"c | sort | head -n "$4" | while IFS= read -r f; do
  size=$(($(wc -c <"$f")))
  [ $((all + size)) -le "$3" ] || continue
  all=$((all + size))
  printf '%s\n%s\n' "$f" "$size"
  head -c "$size" "$f"
done
return 0
"""

# attempt's path; triples: an output, its name as an object, cp or mv
KEEP = r"""
A=$1
mkdir -p "$S" || return 1
xargs -0 sh -c 'while [ $# -gt 0 ]; do printf %s "$1" | tr "\n" "\001"; echo; echo "$2"; echo "$3"; shift 3; done' sh >"$T.n"
while IFS= read -r p && read -r n && read -r how; do
  p=$(printf %s. "$p" | tr '\001' '\n')
  p=$A/${p%.}
  shelf "$n"
  mkdir -p "$D"
  if ! sealed "$n"; then
    if [ -e "$D/$n" ]; then
      [ ! -d "$D/$n" ] || chmod u+rwx "$D/$n"
      mv "$D/$n" "$S/$n.old.$$" && { [ ! -d "$S/$n.old.$$" ] || free "$S/$n.old.$$"; }
      rm -rf "$S/$n.old.$$"
    fi
    if [ -e "$p" ]; then
      [ ! -e "$S/$n" ] || { [ ! -d "$S/$n" ] || free "$S/$n"; rm -rf "${S:?}/$n"; }
      if [ "$how" = mv ] && [ ! -L "$p" ]; then mv "$p" "$S/$n" || continue
      else cp -RH "$p" "$S/$n" || continue
      fi
    fi
    if [ -d "$S/$n" ]; then
      free "$S/$n"
      find "$S/$n" -type f -perm -0100 -exec chmod 0555 {} + -o -type f -exec chmod 0444 {} +
      find "$S/$n" -type d ! -path "$S/$n" -exec chmod 0555 {} +
      mv "$S/$n" "$D/" && chmod 0555 "$D/$n" || continue
    else
      case $n in *.x) chmod 0555 "$S/$n" ;; *) chmod 0444 "$S/$n" ;; esac
      mv -f "$S/$n" "$D/" || continue
    fi
    seal "$n" && { [ ! -f "$A.out" ] || touch -r "$A.out" "seals/$n"; }
  fi
  echo "$n"
done <"$T.n"
return 0
"""

# file, where to begin, how many bytes at most
READ = r"""
[ ! -f "$1" ] || tail -c +$(($2 + 1)) "$1" | head -c "$3"
"""

# paths
REMOVE = r"""
xargs -0 sh -c 'for f; do
  case $f in */attempts/*) set -- "$@" "$f.in" "$f.out" ;; esac
done
rm -rf "$@" 2>/dev/null
for f; do
  [ -e "$f" ] || [ -L "$f" ] || continue
  [ ! -d "$f" ] || [ -L "$f" ] || find "$f" -type d -exec chmod u+rwx {} +
  rm -rf "$f"
done' sh
"""

FREE = "df -Pk . | tail -n 1"

# minutes without use, and between two sweeps; names to keep -> those that were deleted, and states as `states/…`
SWEEP = r"""
cat >"$T.k"
[ "$2" = 0 ] || [ -z "$(find . -maxdepth 1 -name swept -mmin "-$2")" ] || return 0
: >swept
for i in attempts/*.in; do
  [ ! -f "$i" ] || tr '\0' '\n' <"$i" | sed 's:.*/::' >>"$T.k"
done
find used -type f -mmin +"$1" | sed 's:.*/::' | while read -r n; do
  if ! grep -qxF -e "$n" "$T.k" && [ -n "$(find "used/$n" -mmin +"$1")" ]; then
    shelf "$n"
    rm -f "seals/$n" "used/$n"
    [ ! -d "$D/$n" ] || { chmod u+w "$D/$n" && free "$D/$n"; }
    rm -rf "${D:?}/$n" "$D/$n.json"
    echo "$n"
  fi
done
find partial -mindepth 2 -maxdepth 2 -name .alive -mmin +1440 | while read -r a; do
  free "${a%/.alive}"
  rm -rf "${a%/.alive}"
done
[ -z "$(ls -A attempts)" ] || return 0
for s in states/*; do
  [ -d "$s" ] && [ -z "$(find "$s" -mmin "-$1" | head -n 1)" ] || continue
  free "$s"
  rm -rf "$s"
  echo "$s"
done
return 0
"""

# folder, bytes to leave out of the first file; files -> their bytes, one after the other, behind a line with the word
SEND_HOME = r"""
export LC_ALL=C
cd "$2" && printf '\n%s\n' "$1" && xargs -0 sh -c 'at=$0
[ "$at" = 0 ] || [ $# -eq 0 ] || { tail -c +$((at + 1)) "$1"; shift; }
[ $# -eq 0 ] || cat "$@"' "$3"
"""

_NOT_WORDS = frozenset((SURVEY, LIST, TAKE, READ, REMAINS))
