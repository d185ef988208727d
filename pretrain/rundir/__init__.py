"""A run's directory: the contract between `pretrain`, `launcher` and other tools.

docs/run_directory.md describes it.

Both commands read and write a run through this room alone. It never imports torch: the launcher
runs on login nodes.

- paths.py: where everything lies, the version of the layout; phases, outcomes, exit codes
- files.py: publish files and folders in one move; read JSON whatever state it is in
- attempts.py: the attempts at a run, of which one at a time is made
- trust.py: that nobody else put something there, and that no secret is written there
- checkpoints.py, history.py: ancestry, which checkpoints there are, which go
- metrics.py: metrics.jsonl
- jobs.py: the starts of a run: the Slurm jobs sent for it, what an attempt was made with
"""
