"""Collecting: limits, trajectories, the collector, run folders and the command line."""
