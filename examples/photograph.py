"""Learn an optimiser from sixteen photographs, then fit a network to one that it has not seen.

python examples/photograph.py
"""

import argparse

import torch

import metamd


def fit(task, make):
    """An ordinary training loop; the PSNR in dB of the fitted picture."""
    params = {name: p.requires_grad_() for name, p in task.init().items()}
    optimiser = make(list(params.items()))
    for step in range(task.steps):
        optimiser.zero_grad()
        task.loss(params, task.batch(step)).backward()
        optimiser.step()
    if hasattr(optimiser, "eval"):
        optimiser.eval()  # a tail average, where the file recommends one
    return task.evaluate(params).measures["PSNR, dB"]


def main() -> None:
    """Learn, save, and compare on one task that was held out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of one training")
    parser.add_argument("--side", type=int, default=64, help="of the picture, in pixels")
    parser.add_argument("--tasks", type=int, default=8, help="runs to learn from")
    parser.add_argument("--file", default="photograph.safetensors", help="where the learned optimiser goes")
    options = parser.parse_args()

    family = metamd.tasks.pictures(side=options.side, steps=options.steps)
    learned = metamd.meta_train(family, tasks_per_step=options.tasks)
    learned.save(options.file)

    held_out = family.held_out()
    task = held_out.build(held_out.sample(torch.Generator().manual_seed(0)))
    print(f"{task.config['domain']}, PSNR in dB after {task.steps} steps")
    print(f"MetaMD, nothing tuned: {fit(task, lambda named: metamd.MetaMD(named, learned, steps=task.steps)):.2f}")
    for rate in (1e-3, 3e-3, 1e-2):
        print(f"Adam at {rate}: {fit(task, lambda named, rate=rate: torch.optim.Adam((p for _, p in named), lr=rate)):.2f}")


if __name__ == "__main__":
    main()
