"""Laws, rules, keys."""
