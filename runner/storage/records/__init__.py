"""Database records: runs, events, leases, deliveries, and the local index.

In SQLite, or in PostgreSQL for several machines.
"""
