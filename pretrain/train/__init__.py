"""Training: the loop, and what it calls."""
