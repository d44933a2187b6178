"""Eight-bit integers with one scale per group."""
