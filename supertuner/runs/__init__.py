"""Reads run folders and sends requests to running jobs, without torch; used by the command line, live page, bridges."""
