"""What came of a run: outcome, checks, findings, story, and how they are shown."""
