"""The tiers that run the real connector."""
