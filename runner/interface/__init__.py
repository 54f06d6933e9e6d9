"""What people and programs touch: command line, console, diagnostics."""
