"""Run the `pretrain` command as `python -m pretrain`."""

from pretrain.cli import main

if __name__ == "__main__":
    main()
