"""Tests of `kernels_pallas`."""
