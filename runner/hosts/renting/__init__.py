"""Rented machines: requirements, offers, leases, and their costs."""
