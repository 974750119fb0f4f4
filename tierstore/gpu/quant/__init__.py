"""Encodes and decodes pages on the GPU, so that only payloads are transferred over the link."""
