"""`python -m kvcover` is `kvcover`, and takes no more code from the current folder than that."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # where `-m` looks first

from kvcover.sim.cli import main

if __name__ == "__main__":
    main()
