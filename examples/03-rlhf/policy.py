"""A policy: for each question, answers with a score; the probabilities are their softmax."""

import json
import math


def read(path):
    with open(path) as file:
        return json.load(file)


def write(path, value):
    with open(path, "w") as file:
        json.dump(value, file, indent=1)


def probabilities(scores):
    top = max(scores.values())
    weights = {answer: math.exp(score - top) for answer, score in scores.items()}
    total = sum(weights.values())
    return {answer: weight / total for answer, weight in weights.items()}
