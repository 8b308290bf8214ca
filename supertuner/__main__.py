"""Runs the command line: `python -m supertuner`."""

from supertuner.cli import main

if __name__ == "__main__":
    main()
