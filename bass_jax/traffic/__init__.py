"""Traffic: requests over time against one scheduler, in real time on a device or in simulated time."""
