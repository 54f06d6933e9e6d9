"""The REST server of a workspace: it stores runs, sets requests and reads.  It carries nothing out; workers do.  Only `recipe serve` imports it."""
