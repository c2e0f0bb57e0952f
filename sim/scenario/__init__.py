"""What is to be run: the strict description, everything looked up, routers and fabrics."""
