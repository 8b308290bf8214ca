"""A step known before it runs: what it needs, how long it takes at least, and where its bytes should live."""
