"""Real routers: the legs of a live one as they go by, and those of one that is run here between stub engines."""
