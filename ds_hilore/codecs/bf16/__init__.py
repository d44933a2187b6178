"""bfloat16 codes of float32 state."""
