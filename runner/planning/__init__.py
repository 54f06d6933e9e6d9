"""A Recipe and its inputs become a Plan, and decisions about it.  Pure: no disk, clock, process or network."""
