"""`python -m pretrain` is `pretrain`."""

from pretrain.cli import main

if __name__ == "__main__":
    main()
