"""The Hugging Face Trainer: it builds the optimiser from a class, and `as_optimizer_class` makes one of a file.

python examples/trainer.py
"""

import sys
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments

import metamd

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


class Regression(nn.Module):
    """What the Trainer asks of a model: keyword arguments in, a mapping with the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch."""
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def data(seed: int) -> list[dict[str, torch.Tensor]]:
    """One data set of the family."""
    g = torch.Generator().manual_seed(seed)
    x, target = torch.randn(128, 4, generator=g), torch.randn(4, 1, generator=g)
    return [{"x": row, "labels": y} for row, y in zip(x, (x @ target).sin(), strict=True)]


def recorded(seed: int) -> metamd.Run:
    """A run of AdamW on another data set, in a loop of one's own."""
    model, rows = Regression(), data(seed)
    opt = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    recorder = metamd.Recorder(opt, name=f"run {seed}", batch_size=16)
    for i in range(0, 8 * EPOCHS * 16, 16):
        batch = [rows[(i + j) % 128] for j in range(16)]
        opt.zero_grad()
        model(*(torch.stack([row[k] for row in batch]) for k in ("x", "labels")))["loss"].backward()
        opt.step()
    return recorder.finish()


if __name__ == "__main__":
    torch.manual_seed(0)
    optimiser = metamd.as_optimizer_class(metamd.learn([recorded(0), recorded(1)]), steps=8 * EPOCHS)
    with TemporaryDirectory() as place:
        quiet = {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        inside = {"lr_scheduler_type": "constant", "max_grad_norm": 0}  # clipping would shorten the learned steps
        arguments = TrainingArguments(place, num_train_epochs=EPOCHS, per_device_train_batch_size=16, **inside, **quiet)
        trainer = Trainer(Regression(), arguments, train_dataset=data(2), optimizer_cls_and_kwargs=(optimiser, {}))
        trainer.remove_callback(PrinterCallback)
        print(f"mean loss {trainer.train().training_loss:.4f}")
