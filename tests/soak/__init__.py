"""Many updates of random shapes, budgets and dead rows: memory stays flat, budgets are kept, predictions hold."""
