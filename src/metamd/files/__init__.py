"""What lies on disk: one container, learned optimisers, recorded runs, starts, results."""
