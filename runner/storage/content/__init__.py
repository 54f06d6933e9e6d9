"""Content-addressed files and trees: digests, objects, packs."""
