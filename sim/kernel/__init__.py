"""Virtual time, messages between ranks, and the history of a run."""
