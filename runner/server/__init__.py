"""The REST server of a workspace. It queues, controls and reads runs; workers execute them.

Only commands that start a server import this package.
"""
