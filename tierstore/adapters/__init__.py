"""Doors to inference engines. An adapter translates: policy and residency are decided below it."""
