"""The recipe language: documents, schema, inputs and templates.

Parses a recipe file into a Recipe. Independent of plans, stores and hosts.
"""
