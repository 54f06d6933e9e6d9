"""Stands for src/data_split.py, train.py and evaluate.py of the project: python steps.py split|train|evaluate …"""

import json
import os
import pathlib
import random
import shutil
import sys


def report(**values: float) -> None:
    with open(os.environ["RECIPE_METRICS"], "a") as file:
        file.write(json.dumps(values) + "\n")


def split(images: str, train: str, test: str, share: str, seed: str) -> None:
    paths = sorted(pathlib.Path(images).iterdir())
    random.Random(int(seed)).shuffle(paths)
    cut = round(len(paths) * float(share))
    for n, path in enumerate(paths):
        shutil.copy(path, test if n < cut else train)


def train(config: str, data: str, model: str) -> None:
    params = json.loads(pathlib.Path(config).read_text())
    for epoch in range(1, params["epochs"] + 1):
        report(step=epoch, loss=params["lr"] / epoch)
    names = sorted(path.name for path in pathlib.Path(data).iterdir())
    pathlib.Path(model).write_text(json.dumps({"params": params, "seen": names}))


def evaluate(model: str, data: str, out: str) -> None:
    seen = json.loads(pathlib.Path(model).read_text())["seen"]
    tested = [path.name for path in pathlib.Path(data).iterdir()]
    dice = len(seen) / (len(seen) + len(tested))
    report(dice=dice)
    pathlib.Path(out).write_text(
        json.dumps({"dice": dice, "leaked": sorted(set(seen) & set(tested))})
    )


if __name__ == "__main__":
    {"split": split, "train": train, "evaluate": evaluate}[sys.argv[1]](*sys.argv[2:])
