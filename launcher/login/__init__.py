"""The login node's half of the launcher: submit runs to Slurm, follow them and control them.

Nothing here runs on a compute node. These modules use Slurm's commands (sbatch, squeue, scontrol,
scancel) and the files in RUN, so they work from any login node that sees the shared file system.
"""
