"""Execute runs: submit a request, claim its run, execute it and store its result.

`steps` contains the event loop.
"""
