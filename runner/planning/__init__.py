"""Compile a recipe and its inputs into a plan, and decide which steps run.

Pure: no disk, clock, process or network.
"""
