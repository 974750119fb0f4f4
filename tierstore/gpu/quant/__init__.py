"""Pages encoded and decoded on the card, so that only payloads cross the link."""
