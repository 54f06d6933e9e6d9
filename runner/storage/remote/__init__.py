"""Shared store: contents and cached results in a bucket or directory that several machines use."""
