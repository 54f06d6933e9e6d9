"""Hosts for tasks: leases, transfers, containers and environments.  Independent of plans."""
