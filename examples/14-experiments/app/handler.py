"""The code that serves the model."""


def predict(model: str, image: str) -> str:
    return f"{model} says {image}"
