"""What stands in for MoRI-IO."""
