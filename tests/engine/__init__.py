"""Policies."""
