"""Run the `launcher` command as `python -m pretrain.launcher`.

Batch scripts start it this way, because they know the path of the Python interpreter and not that
of the installed command.
"""

from pretrain.launcher.cli import main

if __name__ == "__main__":
    main()
