"""Traces of requests, replayed through the directory and the policies that a store runs on; no bytes, no threads."""
