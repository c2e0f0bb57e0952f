"""Many runs: matrices, the corpus, swarms, grids, shrinking."""
