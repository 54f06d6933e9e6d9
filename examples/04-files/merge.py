"""Add up tables of counts: merge.py LIST.json TOTAL.tsv"""

import json
import sys
from collections import Counter

names, target = sys.argv[1:]
total = Counter()
with open(names) as file:
    tables = json.load(file)
for table in tables:
    with open(table) as file:
        for line in file:
            word, count = line.split("\t")
            total[word] += int(count)
with open(target, "w") as file:
    file.writelines(
        f"{word}\t{count}\n"
        for word, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))
    )
print(f"{len(tables)} tables, {len(total)} words")
