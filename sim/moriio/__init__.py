"""The MoRI-IO connector, as both engines run it."""
