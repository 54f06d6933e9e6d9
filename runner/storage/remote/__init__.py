"""A store of contents that several machines share, in a bucket or a folder."""
