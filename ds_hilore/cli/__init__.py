"""L6: the command `hilore`."""
