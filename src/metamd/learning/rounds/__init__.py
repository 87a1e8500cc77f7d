"""Algorithm 1: outer steps over the tasks of a family."""
