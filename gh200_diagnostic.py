"""`python gh200_diagnostic.py …`, as the GH200 forks call it: `supertuner doctor` with the same options."""

import sys

from supertuner.cli import main

main(["doctor", *sys.argv[1:]])
