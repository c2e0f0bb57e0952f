"""Drives the ranks and schedulers of a real run, and imports no vLLM."""
