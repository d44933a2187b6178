"""L1: bytes. What a rank should hold (ledger) and what it physically holds (meter)."""
