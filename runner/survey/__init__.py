"""All the I/O that a plan needs: files, traces and stores become Facts, and Facts verdicts.  Runs nothing."""
