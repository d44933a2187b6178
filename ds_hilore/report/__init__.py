"""What a run was: the log that each rank writes, and the page with pictures that is made from all of them."""
