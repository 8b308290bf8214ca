"""The words every room shares; standard library only."""
