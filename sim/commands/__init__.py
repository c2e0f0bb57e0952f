"""The commands of `kvcover`, one module each. They import what they need when they run, so that `--help` is fast."""
