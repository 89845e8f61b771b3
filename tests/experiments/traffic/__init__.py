"""Traffic."""
