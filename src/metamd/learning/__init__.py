"""From runs to a learned-optimiser file."""
