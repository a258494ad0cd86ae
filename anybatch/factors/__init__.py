"""Per-example gradients as factors: what they are made of, their norms, and weighted sums of them."""
