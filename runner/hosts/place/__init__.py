"""One place and one task on it: its directory, its command, its outputs and checkpoints; here, elsewhere, or on several hosts."""
