"""Connections to the agents of hosts: requests, jobs, and reconnection."""
