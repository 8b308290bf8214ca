"""What a command does beyond parsing and printing: one file per command that needs more than one room."""
