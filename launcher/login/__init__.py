"""The login node's side of the launcher: submit runs, follow them and steer them, through Slurm's commands and RUN's files."""
