"""Storage: file digests, objects, cached results, runs, and shared stores.

Independent of plan execution.
"""
