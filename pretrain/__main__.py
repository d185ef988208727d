"""Run the `pretrain` command, and turn every way in which it can end into an exit code.

`python -m pretrain` does the same where the path of the installed command is not known.
"""

from __future__ import annotations

import warnings

from pretrain.startup import leave_on_ctrl_c


def main() -> None:
    """Run the command and end the process with its exit code; see `processes.run_command`."""
    leave_on_ctrl_c()
    # Megatron and DeepSpeed warn about optional packages at import, a screenful for every process.
    warnings.simplefilter("ignore")
    from pretrain.processes import run_command

    run_command("pretrain.cli.commands")


if __name__ == "__main__":
    main()
