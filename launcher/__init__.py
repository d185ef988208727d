"""The `launcher` command: starts a run's processes. Never imports torch: it runs on a login node."""
