"""Put all texts into one file of bytes, in the order of their names, with a zero between them."""

import sys
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
texts = [path.read_bytes() for path in sorted(source.rglob("*.txt"))]
target.write_bytes(b"\0".join(texts))
print(f"{len(texts)} files, {target.stat().st_size} bytes")
