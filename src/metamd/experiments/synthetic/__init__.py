"""The paper's experiments on quadratics and the Rosenbrock function."""
