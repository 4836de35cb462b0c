"""Papers that are reproduced with pfedlms, through its public API."""
