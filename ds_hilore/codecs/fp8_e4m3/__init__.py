"""Eight-bit floats, scaled per group or unscaled."""
