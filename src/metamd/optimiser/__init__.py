"""`MetaMD` as a `torch.optim.Optimizer`, how it binds to parameters, and the certificate of a run."""
