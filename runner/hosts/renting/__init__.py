"""Machines that cost money: what is needed, what is offered, leases and what they may cost."""
