"""Finds ranks that are gone, stopped or hanging, and ends the job with a message that names them."""
