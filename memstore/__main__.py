"""``python -m memstore``: the command line where the command itself is not on the path."""

from memstore.cli import main

main()
