"""The wiring of data, caches and a family's encoders: what is missing is encoded, and batches find their entries."""
