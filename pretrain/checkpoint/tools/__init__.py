"""The subcommands of `pretrain checkpoint`: list, show, verify, diff, prune and consolidate."""
