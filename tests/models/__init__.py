"""Models: logits, sharding, families."""
