"""Learn an optimiser for low-rank adapters from twenty speakers, then adapt a language model to one it has not met.

python examples/adapters.py
"""

import argparse

import torch

import metamd


def adapt(task, make):
    """An ordinary training loop; the bits per character of text that was held out."""
    params = {name: p.requires_grad_() for name, p in task.init().items()}
    optimiser = make(list(params.items()))
    for step in range(task.steps):
        optimiser.zero_grad()
        task.loss(params, task.batch(step)).backward()
        optimiser.step()
    if hasattr(optimiser, "eval"):
        optimiser.eval()  # a tail average, where the file recommends one
    return task.evaluate(params, "test").measures["bits per character"]


def main() -> None:
    """Learn, save, and compare on one task that was held out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of one training")
    parser.add_argument("--tasks", type=int, default=8, help="runs to learn from")
    parser.add_argument("--file", default="adapters.safetensors", help="where the learned optimiser goes")
    options = parser.parse_args()

    family = metamd.tasks.speakers(steps=options.steps)
    learned = metamd.meta_train(family, tasks_per_step=options.tasks)
    learned.save(options.file)

    held_out = family.held_out()
    task = held_out.build(held_out.sample(torch.Generator().manual_seed(0)))
    before = task.evaluate(task.init(), "test").measures["bits per character"]
    print(f"{task.config['domain']}, bits per character: {before:.3f} before")
    print(f"MetaMD, nothing tuned: {adapt(task, lambda named: metamd.MetaMD(named, learned, steps=task.steps)):.3f}")
    for rate in (1e-3, 3e-3, 1e-2):
        found = adapt(task, lambda named, rate=rate: torch.optim.AdamW((p for _, p in named), lr=rate))
        print(f"AdamW at {rate}: {found:.3f}")


if __name__ == "__main__":
    main()
