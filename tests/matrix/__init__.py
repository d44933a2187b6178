"""Compatibility: every pair of settings occurs in some cell, and each cell is compared with DeepSpeed alone."""
