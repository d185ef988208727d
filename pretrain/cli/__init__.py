"""The `pretrain` command: parse arguments, call, print."""
