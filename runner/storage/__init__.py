"""Storage: file digests, objects, traces, runs, and shared stores. Independent of plan execution."""
