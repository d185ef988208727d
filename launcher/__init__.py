"""Define the `launcher` command, which starts the processes of runs here or on a Slurm cluster.

It never imports torch: it also runs on login nodes, where torch may be missing and takes seconds.

- __main__.py, cli.py: the command line
- slurm.py (ask Slurm) and slurm_job.py (describe a job): only these two know Slurm's commands,
  options and output; site.py: what a cluster has
- submit.py, status.py, control.py: run on the login node, and end before the run does
- supervise.py, ranks.py, job.py, preflight.py: run beside the ranks, on a compute node or here
- agent.py: runs between srun and a rank
- evaluations.py: one job per checkpoint of a run, submitted from the login node or beside the ranks
"""
