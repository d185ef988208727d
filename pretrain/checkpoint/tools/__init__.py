"""What `pretrain checkpoint` does: list, show, verify, diff, prune and consolidate."""
