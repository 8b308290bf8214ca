"""Encodes samples and captions with the VAE and the text encoder, caches the results, and looks them up for batches.

`corpus_caches` fills and opens the caches, `cache_plan` decides which entries exist under which keys, `encoders` makes
them, `cache_lookup` finds them for a micro-batch, `epochs` refreshes them each epoch, `node_sharing` shares the work.
"""
