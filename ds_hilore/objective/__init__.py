"""The loss and what is read off it: GRPO losses, token coefficients, exposure, chunked log-probabilities.

Level L1: pure functions on tensors, no state, no host framework. Import from the files by their names.
"""
