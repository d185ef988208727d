"""A run's directory: the contract between `pretrain`, `launcher` and other tools.

docs/run_directory.md describes it.

Both commands read and write a run through this room alone. It never imports torch: the launcher
runs on login nodes.

- paths.py: where everything lies, and the version of the layout
- states.py: phases, outcomes, exit codes
- files.py: publish files and folders in one move; read JSON whatever state it is in
- attempts.py, lock.py: the attempts at a run, of which one at a time is made
- provenance.py, source.py, credentials.py: what an attempt was made with, without secrets
- checkpoints.py: names of checkpoints, which are complete
- metrics.py: metrics.jsonl
- jobs.py: the Slurm jobs sent for a run
"""
