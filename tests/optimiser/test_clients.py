"""Lightning, Accelerate and the Hugging Face Trainer: train, checkpoint, resume in fresh objects, equal bit for bit.

Each client has to end where the plain loop below ends, and so has a run that its own checkpoint interrupted on a kink of
the geometry. The same comparison rejects a resumed run whose optimiser state was lost.
"""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from metamd import MetaMD
from tests.helpers import equal_parameters, random_geometry, small_model

LR, GAMMA, CLIP = 0.3, 0.98, 0.5
BATCH, BATCHES, EPOCHS, SAVED = 16, 5, 6, 3


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """Nothing from the network, and nothing written outside the test's own directory."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def dataset():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * BATCHES, 5, generator=g)
    return TensorDataset(x, torch.stack([x[:, 0] + x[:, 1], x[:, 2] * x[:, 3], x[:, 4].sin()], 1))


def optimiser_for(model):
    return MetaMD(model.named_parameters(), random_geometry(model, seed=9), lr=LR)


def plain_run(epochs=EPOCHS):
    """The loop that the clients stand for."""
    model = small_model()
    optimiser = optimiser_for(model)
    schedule = ExponentialLR(optimiser, GAMMA)
    for _ in range(epochs):
        for x, y in DataLoader(dataset(), BATCH):
            optimiser.zero_grad()
            (model(x) - y).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimiser.step()
            schedule.step()
    return model, optimiser


def same(one, two):
    """Whether two runs, each a model and its optimiser, ended alike and passed the same pieces."""
    return equal_parameters(one[0], two[0]) and torch.equal(one[1].active_pieces, two[1].active_pieces)


def assert_resumes(whole, resumed):
    """The whole run is that of the plain loop, passes pieces before and after the checkpoint, and is met again."""
    pieces = whole[1].active_pieces.split([BATCHES * SAVED, BATCHES * (EPOCHS - SAVED)])
    assert all(len(part.unique()) > 1 for part in pieces)
    assert same(whole, plain_run())
    assert same(whole, resumed)


def forget(path):
    """Make a checkpoint's optimiser one that has not stepped yet; model, learning rate and the rest stay as saved."""
    saved = torch.load(path, weights_only=True)
    state = saved["optimizer_states"][0] if "optimizer_states" in saved else saved
    assert (state["param_groups"][0]["weights"] > 0).sum() > 1, "the checkpoint should lie on a kink"
    state["state"].clear()
    for group in state["param_groups"]:
        group["weights"].zero_()
    torch.save(saved, path)


# Lightning --------------------------------------------------------------------------------------------------------------


def lightning_warnings(test):
    """Lets pass what Lightning says of torch, of the machine, and of a run that is resumed in another folder."""
    for warning in (
        r"`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        r"The 'train_dataloader' does not have many workers:UserWarning",
        r"GPU available but not used:UserWarning",
        r"The dirpath has changed from:UserWarning",
    ):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return test


def lightning_run(folder, epochs, *, ckpt=None):
    """Fit, saving after every epoch; the module's own names start with `model.`, those of the geometry do not."""
    L = pytest.importorskip("lightning", reason="lightning is not installed")

    class Regression(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_model(seed=0 if ckpt is None else 1)

        def training_step(self, batch, _):
            x, y = batch
            return (self.model(x) - y).square().mean()

        def configure_optimizers(self):
            named = list(self.named_parameters())
            geometry = random_geometry(small_model(), seed=9).bind(named, rename=lambda n: n.removeprefix("model."))
            optimiser = MetaMD(named, geometry, lr=LR)
            schedule = {"scheduler": ExponentialLR(optimiser, GAMMA), "interval": "step"}
            return {"optimizer": optimiser, "lr_scheduler": schedule}

    module = Regression()
    trainer = L.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=epochs,
        gradient_clip_val=CLIP,
        callbacks=[L.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset(), BATCH), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.model, trainer.optimizers[0]


@lightning_warnings
def test_lightning(tmp_path):
    whole = lightning_run(tmp_path / "whole", EPOCHS)
    lightning_run(tmp_path / "half", SAVED)
    by_callback, by_trainer = tmp_path / "whole" / f"epoch={SAVED - 1}.ckpt", tmp_path / "half" / "last.ckpt"
    for checkpoint in (by_callback, by_trainer):
        assert_resumes(whole, lightning_run(tmp_path / f"resumed-{checkpoint.stem}", EPOCHS, ckpt=checkpoint))
    forget(by_trainer)
    assert not equal_parameters(whole[0], lightning_run(tmp_path / "forgetful", EPOCHS, ckpt=by_trainer)[0])


@lightning_warnings
def test_lightning_names_need_the_rename():
    L = pytest.importorskip("lightning", reason="lightning is not installed")
    module = L.LightningModule()
    module.model = small_model()
    geometry = random_geometry(module.model)
    named = list(module.named_parameters())
    with pytest.raises(ValueError, match=r"'model\.0\.weight' of shape \(8, 5\) has no metric.*rename="):
        MetaMD(named, geometry)
    renamed = MetaMD(named, geometry.bind(named, rename=lambda n: n.removeprefix("model.")))
    assert set(renamed.potential.slots) == {n for n, _ in module.model.named_parameters()}


# Accelerate -------------------------------------------------------------------------------------------------------------


def accelerate_run(epochs, *, save=None, load=None):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(cpu=True)
    model = small_model(seed=0 if load is None else 1)
    optimiser = optimiser_for(model)
    data, schedule = DataLoader(dataset(), BATCH), ExponentialLR(optimiser, GAMMA)
    wrapped, prepared, data, schedule = accelerator.prepare(model, optimiser, data, schedule)
    if load is not None:
        accelerator.load_state(load)
    for _ in range(epochs):
        for x, y in data:
            prepared.zero_grad()
            accelerator.backward((wrapped(x) - y).square().mean())
            accelerator.clip_grad_norm_(wrapped.parameters(), CLIP)
            prepared.step()
            schedule.step()
    if save is not None:
        accelerator.save_state(save)
    return model, prepared.optimizer


def test_accelerate(tmp_path):
    half = tmp_path / "half"
    whole = accelerate_run(EPOCHS)
    accelerate_run(SAVED, save=half)
    assert_resumes(whole, accelerate_run(EPOCHS - SAVED, load=half))
    forget(half / "optimizer.bin")
    assert not equal_parameters(whole[0], accelerate_run(EPOCHS - SAVED, load=half)[0])


# The Hugging Face Trainer -----------------------------------------------------------------------------------------------


class Regression(nn.Module):
    """What the Trainer asks of a model: keyword arguments in, a mapping with the loss out."""

    def __init__(self, seed=0):
        super().__init__()
        self.model = small_model(seed)

    def forward(self, x, labels):
        return {"loss": (self.model(x) - labels).square().mean()}


def trainer_run(folder, epochs, *, resume=None):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    net = Regression(seed=0 if resume is None else 1)
    optimiser = optimiser_for(net.model)
    trainer = transformers.Trainer(
        net,
        transformers.TrainingArguments(
            folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            max_grad_norm=CLIP,
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"x": x, "labels": y} for x, y in dataset()],
        optimizers=(optimiser, ExponentialLR(optimiser, GAMMA)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return net.model, optimiser


def test_transformers(tmp_path):
    whole = trainer_run(tmp_path / "whole", EPOCHS)
    half = tmp_path / "whole" / f"checkpoint-{SAVED * BATCHES}"
    assert_resumes(whole, trainer_run(tmp_path / "resumed", EPOCHS, resume=str(half)))
    forget(half / "optimizer.pt")
    assert not equal_parameters(whole[0], trainer_run(tmp_path / "forgetful", EPOCHS, resume=str(half))[0])
