"""The regret certificate of a run."""
