"""Training: the start of a run, its steps, and what happens between them."""
