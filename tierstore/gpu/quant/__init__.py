"""Encoding and decoding of pages on the card, so that only payloads cross the link."""
