"""Any order of what hosts do with an engine, found by hypothesis, against DeepSpeed without checkpointing."""
