"""Define the `launcher` command, which starts the processes of runs here or on a Slurm cluster.

It never imports torch: it also runs on login nodes, where torch may be missing and takes seconds.

- __main__.py, cli.py: the command line
- slurm.py, site.py: the only file that knows Slurm's words, and what a user's cluster has
- submit.py, status.py, control.py: on the login node, where each command ends before the run does
- supervise.py, ranks.py, job.py, preflight.py: beside the ranks; on a compute node, or here
- agent.py: between srun and a rank
- evaluations.py: one job for each checkpoint of a run, which both sides send
"""
