"""`python -m kvcover` is `kvcover`."""

from kvcover.sim.cli import main

if __name__ == "__main__":
    main()
