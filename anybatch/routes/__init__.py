"""One file for each way of computing the same gradient."""
