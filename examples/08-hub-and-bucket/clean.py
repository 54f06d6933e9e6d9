"""Keep chats that were answered, once each, as rows of messages."""

import json
import sys
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
seen = set()
with target.open("w") as file:
    for path in sorted(source.rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            messages = json.loads(line)["messages"]
            text = json.dumps({"messages": messages}, sort_keys=True)
            if messages and messages[-1]["role"] == "assistant" and text not in seen:
                seen.add(text)
                print(text, file=file)
print(f"{len(seen)} chats")
