"""Read a recipe file into a Recipe: text, positions, schema, values, templates.

Knows nothing of plans, stores or hosts.
"""
