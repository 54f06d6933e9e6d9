"""User interfaces: the command line, the console, Python handles, and HTML reports."""
