"""L2: how the saved state of one unit call is held, derived, replayed and freed. Knows no engine and no GRPO."""
