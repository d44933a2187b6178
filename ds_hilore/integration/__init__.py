"""L5: one file per host. Nothing here is imported before its host is used."""
