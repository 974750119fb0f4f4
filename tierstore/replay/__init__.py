"""Replay of request traces with the store's bookkeeping and policies, but without page bytes or threads."""
