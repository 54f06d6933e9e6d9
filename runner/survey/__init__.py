"""I/O for planning: read files, traces and stores into Facts, and compute verdicts.

Runs nothing.
"""
