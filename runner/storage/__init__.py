"""What is remembered: files and their digests, artifacts, traces, runs.  Knows nothing of plans in execution."""
