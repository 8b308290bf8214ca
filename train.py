"""`python train.py --config …`, as the GH200 forks call it, also by torchrun and `accelerate launch`: `supertuner train`."""

import sys

from supertuner.cli import main
from supertuner.cli.train import translate_arguments

main(translate_arguments(sys.argv[1:]))
