"""The agent on every host: starts jobs, supervises them and records their ends.

It uses only the standard library of Python 3.9 and no other module of the product.
"""
