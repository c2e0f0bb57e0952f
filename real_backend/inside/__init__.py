"""What runs inside a rank's or a scheduler's process, beside vLLM's own code."""
