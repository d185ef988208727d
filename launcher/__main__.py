"""`python -m launcher` is `launcher`, for where only the path of the Python is known."""

from pretrain.launcher.cli import main

if __name__ == "__main__":
    main()
