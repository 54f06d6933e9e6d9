"""Python handles for runs in this workspace, in a database or on a server.

`core` holds the logic as generators without I/O.  `shells` execute the generators, synchronously in `Run` and asynchronously in `AsyncRun`.
`here` answers from a workspace, and `there` sends requests to a server.
"""
