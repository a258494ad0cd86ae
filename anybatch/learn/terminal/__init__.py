"""`anybatch learn` for people: pages, keys, and the commands."""
