"""Lightning: `configure_optimizers` returns MetaMD with a file. Nothing else of the module changes.

python examples/lightning_module.py
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import metamd

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5


class Digits(lightning.LightningModule):
    """LeNet with a file that comes with the package."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.model = metamd.models.LeNet(generator=torch.Generator().manual_seed(0))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The names are those of the network, `self.model`, as the file was learned with them."""
        return metamd.MetaMD(self.model.named_parameters(), "lenet-digits", steps=self.steps)

    def on_train_end(self) -> None:
        """The model becomes the average of its last steps, if the file recommends one."""
        self.optimizers().optimizer.eval()


if __name__ == "__main__":
    g = torch.Generator().manual_seed(1)
    images = torch.rand(256, 1, 28, 28, generator=g)
    labels = (4 * images[:, 0, :14].mean((1, 2)) / images[:, 0, 14:].mean((1, 2))).long().clamp(0, 9)
    batches = DataLoader(TensorDataset(images, labels), batch_size=64)
    module = Digits(steps=EPOCHS * len(batches))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    lightning.Trainer(max_epochs=EPOCHS, accelerator="cpu", **options).fit(module, batches)
    with torch.no_grad():
        print(f"loss {float(nn.functional.cross_entropy(module.model(images), labels)):.4f}")
