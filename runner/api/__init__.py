"""What can be asked of runs: each operation once, for the command line, Python and the server."""
