"""The parts of grpo_arithmetic.py: model, tasks, rollouts, updates, and the comparison of recovery methods."""
