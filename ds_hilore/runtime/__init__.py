"""L4: the microbatch state machine. Knows units, plans and coefficients; knows no host framework."""
