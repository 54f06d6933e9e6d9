"""A run as a value in Python, wherever its runs are kept: in this workspace, in a database, behind a server.

`core` decides what is asked and reads what is answered.  `shells` carry that out, one at once and one by `await`.  `here` answers from a workspace,
`far` from a server.
"""
