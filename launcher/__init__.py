"""Define the `launcher` command, which starts the processes of runs here or on a Slurm cluster.

It never imports torch: it also runs on login nodes, where torch may be missing and takes seconds.

- cli.py, options.py: the command line
- cluster.py, job.py, slurm.py: a site, a job for it, and Slurm's commands
- evaluations.py: one evaluation job for each checkpoint of a run; both sides below use it
- login/: runs where the user types, and ends after each command
- node/: runs on compute nodes, beside the ranks
"""
