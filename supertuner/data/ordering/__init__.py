"""Which sample comes when, and in which shape: pure functions of seed, epoch and samples."""
