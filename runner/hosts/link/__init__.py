"""Streams to the agent of a host: what it is asked, how jobs are begun and followed, what to do while it does not answer."""
