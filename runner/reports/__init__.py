"""Webhook deliveries: send the outbox to its receivers by HTTP, program or chat.

Knows the store, but no plans or hosts.
"""
