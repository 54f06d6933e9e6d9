"""Of torchvision what diffusers' example scripts ask for: it is large, and pictures that are prepared already need next to nothing of it.

It is put beside the scripts, for they import it; what it does is written from torchvision's documentation, on Pillow.
"""

__version__ = "0.0"
