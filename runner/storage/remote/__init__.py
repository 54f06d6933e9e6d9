"""Shared store: contents and traces in a bucket or directory that several machines use."""
