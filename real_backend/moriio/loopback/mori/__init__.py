"""A stand-in for AMD's `mori` package. Put `real_backend/moriio/loopback` on a process's path to use it; never install it."""
