"""Replays traces of requests through the store's directory and policies, without bytes or threads."""
