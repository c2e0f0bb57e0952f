"""What is on this machine: vLLM trees, libraries, limits."""
