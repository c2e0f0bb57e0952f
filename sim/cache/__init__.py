"""Which bytes are which cell: the geometry of caches, who holds which head, what landed where."""
