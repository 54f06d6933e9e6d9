"""Event loop of one run, and the classes that own the parts of its state."""
