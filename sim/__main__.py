"""`python -m sim` is `kvcover`."""

from sim.cli import main

if __name__ == "__main__":
    main()
