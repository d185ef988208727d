"""Check that a process that sets up one layout after the other keeps nothing of the former ones."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own, because the pools of tests/distributed keep the groups of their tasks.
REPEATED = """
import os
from pretrain import topology
from pretrain.config import load_config
config = load_config("configs/demo.toml")
for _ in range(4):
    topology.initialize(config)
    print(len(os.listdir("/proc/self/task")))
"""


def test_groups_of_a_layout_are_closed_before_the_next_one_is_set_up() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPEATED], capture_output=True, text=True, check=True
    )
    first, *others = done.stdout.split()
    assert others == [first] * 3
