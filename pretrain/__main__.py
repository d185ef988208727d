"""Run the `pretrain` command as `python -m pretrain`."""

from pretrain.cli.main import main

if __name__ == "__main__":
    main()
