"""Python handles for runs in this workspace, in a database or on a server.

`core` holds the logic as generators without I/O. `shells` execute the generators, synchronously in
`Run` and asynchronously in `AsyncRun`. `local_transport` answers from a workspace, and
`http_transport` sends requests to a server.
"""
