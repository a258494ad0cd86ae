"""Training: the step, the loop around it, its data, checkpoints and log."""
