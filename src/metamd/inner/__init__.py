"""One training run, what it says about a metric, and the estimators of hypergradients."""
