"""The program on every host: begins jobs, keeps them, writes down how they ended.  Standard library only, Python ≥ 3.9; imports nothing else of ours."""
