"""`python -m kvcover` is `kvcover`, and takes no more code from the current folder than that."""

import contextlib
import os
import sys

with contextlib.suppress(FileNotFoundError):  # the current folder is gone, which the command says
    if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # where `-m` looks first

from kvcover.sim.cli import main

if __name__ == "__main__":
    main()
