"""Advice on trainings: known problems, and estimates of memory, time and cost.  Runs nothing."""
