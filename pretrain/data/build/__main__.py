"""Do the tasks of one job of an array: `python -m pretrain.data.build ARRAY`, in the job."""

import os
import sys
from pathlib import Path

from pretrain.data.build.tasks import run_job

run_job(Path(sys.argv[1]), int(os.environ["SLURM_ARRAY_TASK_ID"]))
