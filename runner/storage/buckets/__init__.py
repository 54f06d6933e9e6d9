"""Buckets and folders that hold objects by name."""
