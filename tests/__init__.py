"""Tests, in the places of what they test."""
