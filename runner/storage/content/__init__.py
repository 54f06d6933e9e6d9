"""Files and trees by what they hold: digests, objects, packs."""
