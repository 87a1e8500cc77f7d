"""The paper's experiments, one module for each; `metamd reproduce` runs them."""
