"""Experiments: runs, tasks, scores and reports."""
