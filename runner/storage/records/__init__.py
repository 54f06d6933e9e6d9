"""Rows: runs and their events, leases, reports, what this disk knows.  SQLite, or PostgreSQL for several machines."""
