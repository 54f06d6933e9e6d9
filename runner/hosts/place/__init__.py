"""Places and their tasks: directories, commands, outputs and checkpoints, on one or several hosts."""
