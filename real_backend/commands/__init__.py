"""Commands that need a backend; each imports what it needs when it runs."""
