"""Figures and what draws them."""
