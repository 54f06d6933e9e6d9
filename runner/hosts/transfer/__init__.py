"""Bytes between here and one host: contents and trees, each sent once."""
