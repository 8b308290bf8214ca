"""What the commands do beyond parsing and printing: one file or folder per command."""
