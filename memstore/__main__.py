"""``python -m memstore``: the command line where the command itself is not on the path."""

from memstore.cli import main

if __name__ == "__main__":
    main()
