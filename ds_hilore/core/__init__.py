"""L0: data that crosses levels, the configuration block, errors, and what is installed."""
