"""Types, errors, events, durable writes and host facts that all packages share; standard library only."""
