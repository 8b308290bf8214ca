"""`supertuner train` under the name and flags of the GH200 forks: `python train.py --config …`, also by torchrun."""

import sys

from supertuner.cli import main
from supertuner.cli.train import translate_arguments

main(translate_arguments(sys.argv[1:]))
