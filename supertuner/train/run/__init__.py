"""What a run holds while it trains: its state, data loader, loss weights, logs and memory engine."""
