"""For each primitive, how it treats the batch axis: one file for each family of them."""
