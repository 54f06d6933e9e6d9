"""The program on every host: begins jobs, keeps them, writes down how they ended.  Only the standard library of Python 3.9; nothing else of ours."""
