"""Measured rows, parity with the model, confirmations."""
