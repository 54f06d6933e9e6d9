"""Where tasks run: leases on machines, what is brought there and back, containers and environments.  Knows no plan."""
