"""Several ranks: the process group, sums of gradients over ranks, FSDP2, rendezvous, and checks for equal starts."""
