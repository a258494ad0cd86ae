"""Which way of computing a gradient is the fastest that fits the memory, decided before anything runs."""
