"""A run's directory: the contract between `pretrain`, `launcher` and other tools.

docs/run_directory.md describes it.

Both commands read and write a run only through this package. It never imports torch, because the
launcher runs on login nodes.

- paths.py: the paths of all files, the version of the layout; phases, outcomes, exit codes
- files.py: publish files and folders atomically; read JSON even if it is damaged
- attempts.py: the attempts at a run, of which only one at a time is made
- trust.py: check that nobody else can have put something into a run
- checkpoints.py, history.py: ancestry of checkpoints, which exist, which are removed
- metrics.py: metrics.jsonl
- jobs.py: the starts of a run: its Slurm jobs, and the code and machine of an attempt
"""
