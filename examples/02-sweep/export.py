"""Write a trained model as a formula that a person can read."""

import json
import sys

model, formula = sys.argv[1:]
with open(model) as file:
    weights = json.load(file)
with open(formula, "w") as file:
    file.write("y = {a:.3f} x^2 {b:+.3f} x {c:+.3f}\n".format(**weights))
