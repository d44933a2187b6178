"""L3: bytes and seconds of the variants of each unit, as measured in the running job."""
