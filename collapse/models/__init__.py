"""Architectures of our own; importing this package registers them with transformers."""
