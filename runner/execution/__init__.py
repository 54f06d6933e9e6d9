"""Execute runs: submit a request, claim its run, work on it and store its end.

`steps` contains the event loop.
"""
