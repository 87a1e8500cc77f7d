"""What to expect on the next task."""
