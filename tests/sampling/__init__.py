"""Distributions, rules, keys."""
