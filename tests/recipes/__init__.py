"""Tests of `recipes`."""
