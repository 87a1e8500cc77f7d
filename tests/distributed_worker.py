"""What one process of the distributed tests does; run as `python -m tests.distributed_worker RANK WORLD FOLDER CASE ...`."""

import copy
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from metamd import MetaMD, Online, certify_run
from metamd.optimiser.checkpoint import digests
from metamd.potentials.online import KEPT
from tests.helpers import random_basis, random_geometry, small_model

STEPS = 30


def batch(t, rank, world):
    """Both ranks together see what one process would see."""
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    return x.chunk(world)[rank]


def fit(model, optimiser, rank, world, steps=range(STEPS)):
    for t in steps:
        optimiser.zero_grad()
        x = batch(t, rank, world)
        (model(x) - x[:, :3]).square().mean().backward()
        optimiser.step()


def geometry_and_model(**options):
    model = small_model(dtype=torch.float64)
    if "sides" in options:
        turned = random_basis({n: p.detach() for n, p in model.named_parameters()}, pieces=3, rank=2, scale=1.0, **options)
        return turned.with_metrics(turned.log_d), model
    return random_geometry(model, **options), model


def ddp(rank, world, folder, **options):
    geometry, model = geometry_and_model(**options)
    wrapped = DistributedDataParallel(model)
    optimiser = MetaMD(wrapped.named_parameters(), geometry, lr=0.1)
    fit(wrapped, optimiser, rank, world)
    return {"params": model.state_dict(), "pieces": optimiser.active_pieces, "weights": optimiser._active.weights.tolist()}


def ddp_kronecker(rank, world, folder):
    return ddp(rank, world, folder, sides="both")


def ddp_nonfinite(rank, world, folder):
    geometry, model = geometry_and_model()
    wrapped = DistributedDataParallel(model)
    optimiser = MetaMD(wrapped.named_parameters(), geometry, lr=0.1)
    x = batch(0, rank, world)
    x[0, 0] = torch.nan if rank == 1 else x[0, 0]
    wrapped(x).sum().backward()
    try:
        optimiser.step()
    except RuntimeError as error:
        return {"params": model.state_dict(), "error": str(error)}
    return {"error": None}


def sharded(momentum=0.0, certify=False, averaging="constant", **options):
    geometry, model = geometry_and_model(**options)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    about = {"momentum": momentum, "certify": certify, "averaging": averaging}
    return geometry, model, MetaMD(model.named_parameters(), geometry, lr=0.1, **about)


def whole(model):
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def fsdp(rank, world, folder, **options):
    _, model, optimiser = sharded(**options)
    fit(model, optimiser, rank, world)
    optimiser.eval()
    return {"params": whole(model), "pieces": optimiser.active_pieces, "weights": optimiser._active.weights.tolist()}


def fsdp_channel(rank, world, folder):
    return fsdp(rank, world, folder, tying="channel", centre="origin")


def fsdp_column(rank, world, folder):
    return fsdp(rank, world, folder, tying="column")


def fsdp_kronecker(rank, world, folder):
    return fsdp(rank, world, folder, sides="right")


def fsdp_refused(rank, world, folder):
    try:
        sharded(sides="both")
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def fsdp_momentum(rank, world, folder):
    return fsdp(rank, world, folder, momentum=0.8)


def fsdp_tail(rank, world, folder):
    return fsdp(rank, world, folder, averaging="tail")


def fsdp_after(rank, world, folder):
    """Shard after the optimiser was built and put the shards into its groups, as Accelerate's prepare does."""
    geometry, model = geometry_and_model()
    optimiser = MetaMD(model.named_parameters(), geometry, lr=0.1)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimiser.param_groups[0]["params"] = list(model.parameters())
    fit(model, optimiser, rank, world)
    return {"params": whole(model), "pieces": optimiser.active_pieces, "weights": optimiser._active.weights.tolist()}


def certified(rank, world, folder, made=None):
    """A certificate of shards, and that of a run that went through a distributed checkpoint."""
    made = made or (lambda: sharded(certify=True)[1:])
    (model, optimiser), (other, resumed) = made(), made()
    fit(model, optimiser, rank, world, range(15))
    names = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
    dcp.save(names, checkpoint_id=str(folder / "dcp"))
    fit(model, optimiser, rank, world, range(15, STEPS))
    template = dict(zip(("model", "optimiser"), get_state_dict(other, resumed), strict=True))
    dcp.load(template, checkpoint_id=str(folder / "dcp"))
    set_state_dict(other, resumed, model_state_dict=template["model"], optim_state_dict=template["optimiser"])
    fit(other, resumed, rank, world, range(15, STEPS))
    reference = small_model(seed=1, dtype=torch.float64)
    found = {k: o.certificate(reference, radius=1.0) for k, o in (("one", optimiser), ("resumed", resumed))}
    return {k: {**dataclasses.asdict(c), "text": str(c)} for k, c in found.items()}


def certified_pieces(rank, world, folder):
    """One piece, whose state keeps nothing but what the certificate does, and a tail average."""
    return certified(rank, world, folder, lambda: sharded(certify=True, pieces=1, averaging="tail")[1:])


def certified_ddp(rank, world, folder):
    def made():
        geometry, model = geometry_and_model(pieces=1)
        wrapped = DistributedDataParallel(model)
        return wrapped, MetaMD(wrapped.named_parameters(), geometry, lr=0.1, certify=True)

    return certified(rank, world, folder, made)


def certified_closure(rank, world, folder):
    """Steps with a closure, which gives this process the loss of its own part of the batch."""
    geometry, model = geometry_and_model(pieces=1)
    wrapped, own = DistributedDataParallel(model), []
    optimiser = MetaMD(wrapped.named_parameters(), geometry, lr=0.1, certify=True)
    run = certify_run(optimiser)

    def closure(x):
        optimiser.zero_grad()
        loss = wrapped(x).square().mean()
        loss.backward()
        own.append(loss.item())
        return loss

    for t in range(3):
        optimiser.step(partial(closure, batch(t, rank, world)))
    found = [o.certificate(radius=1.0) for o in (optimiser, run)]
    return {"known": [c.mean_loss for c in found], "given": run.certificate(radius=1.0, mean_loss=2.0).mean_loss, "own": own}


def certified_adam(rank, world, folder):
    """Of shards that another optimiser moves, and of a run that goes on from what each process saved."""

    def made():
        geometry, model, _ = sharded(pieces=1)
        adam = torch.optim.Adam(model.named_parameters(), lr=0.01)
        return model, adam, certify_run(adam, geometry)

    (model, adam, run), (other, again, resumed) = made(), made()
    fit(model, adam, rank, world, range(15))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(adam.state_dict()))
    resumed.load_state_dict(run.state_dict())
    fit(model, adam, rank, world, range(15, STEPS))
    fit(other, again, rank, world, range(15, STEPS))
    reference = small_model(seed=1, dtype=torch.float64)
    return {k: dataclasses.asdict(o.certificate(reference, radius=1.0)) for k, o in (("one", run), ("resumed", resumed))}


def fsdp_nonfinite(rank, world, folder):
    _, model, optimiser = sharded()
    x = batch(0, rank, world)
    model(x).sum().backward()
    if rank == 1:
        model[0].weight.grad.to_local().fill_(torch.inf)
    try:
        optimiser.step()
    except RuntimeError as error:
        return {"params": whole(model), "error": str(error)}
    return {"error": None}


def checkpoint(rank, world, folder):
    """Save with torch.distributed.checkpoint in the middle, load into fresh objects, continue both alike."""
    _, model, optimiser = sharded()
    fit(model, optimiser, rank, world, range(15))
    names = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
    dcp.save(names, checkpoint_id=str(folder / "dcp"))
    weights = optimiser._active.weights.tolist()
    fit(model, optimiser, rank, world, range(15, STEPS))
    _, other, resumed = sharded()
    template = dict(zip(("model", "optimiser"), get_state_dict(other, resumed), strict=True))
    dcp.load(template, checkpoint_id=str(folder / "dcp"))
    set_state_dict(other, resumed, model_state_dict=template["model"], optim_state_dict=template["optimiser"])
    loaded = resumed._active.weights.tolist()
    fit(other, resumed, rank, world, range(15, STEPS))
    return {
        "params": whole(model),
        "resumed": whole(other),
        "weights": weights,
        "loaded": loaded,
        "pieces": (optimiser.active_pieces, resumed.active_pieces),
    }


def checkpoint_online(rank, world, folder):
    """The same under metrics that follow the run, whose states are each rank's own; kernels have squares as matrices."""
    found = {}
    for rule in ONLINE:
        model, optimiser = online_sharded(rule)
        fit_image(model, optimiser, rank, world, range(5))
        names = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
        dcp.save(names, checkpoint_id=str(folder / rule))
        fit_image(model, optimiser, rank, world, range(5, 10))
        other, resumed = online_sharded(rule)
        template = dict(zip(("model", "optimiser"), get_state_dict(other, resumed), strict=True))
        dcp.load(template, checkpoint_id=str(folder / rule))
        set_state_dict(other, resumed, model_state_dict=template["model"], optim_state_dict=template["optimiser"])
        fit_image(other, resumed, rank, world, range(5, 10))
        found[rule] = {"params": whole(model), "resumed": whole(other), "kept": [kept(optimiser), kept(resumed)]}
    return found


def kept(optimiser):
    """What an online metric keeps of every parameter, put together from all processes."""
    states = [{key: state[key] for key in KEPT if key in state} for state in optimiser.state.values()]
    return [{k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()} for state in states]


def checkpoint_edited(rank, world, folder):
    """A layer is reset after a distributed checkpoint was loaded; a run without a checkpoint is edited at the same step."""
    found = {}
    for edited in (False, True):
        for resumed in (False, True):
            _, model, optimiser = sharded(momentum=0.8)
            fit(model, optimiser, rank, world, range(5))
            if resumed:
                saved = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
                dcp.save(saved, checkpoint_id=str(folder / f"dcp-{edited}"))
                _, model, optimiser = sharded(momentum=0.8)
                template = dict(zip(("model", "optimiser"), get_state_dict(model, optimiser), strict=True))
                dcp.load(template, checkpoint_id=str(folder / f"dcp-{edited}"))
                set_state_dict(model, optimiser, model_state_dict=template["model"], optim_state_dict=template["optimiser"])
            if edited:
                with torch.no_grad():
                    model[2].weight.fill_(3.0)
            fit(model, optimiser, rank, world, range(5, 10))
            found[f"edited={edited} resumed={resumed}"] = whole(model)
    shards = dict(model.named_parameters())
    return {**found, "digests": (digests(shards), digests(whole(model)))}


def image_model():
    """A kernel whose three channels two ranks divide unevenly, and a linear layer on top."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()


ONLINE = {
    "average": {"rule": "average"},
    "sum": {"rule": "sum"},
    "polar": {"rule": "polar", "beta": 0.7, "signal": 0.9},
    "polar, whitened": {"rule": "polar", "beta": 0.7, "whiten": 3, "block": 2, "refresh": 2},
    "polar, per parameter": {"rule": "polar", "beta": 0.7},
}


def online_geometry(rule, model):
    """A potential and the online metric of a case; in the last one every coordinate has a metric of its own."""
    start = {n: p.detach() for n, p in model.named_parameters()}
    geometry = random_geometry(model, pieces=1) if rule == "polar, per parameter" else random_basis(start)
    return geometry.with_metrics(geometry.log_d), Online(**ONLINE[rule], scale=dict.fromkeys(start, 50.0))


def online_sharded(rule):
    model = image_model()
    geometry, online = online_geometry(rule, model)
    columns = rule == "polar, per parameter"  # those of the linear layer; three channels of one cannot be cut otherwise
    fully_shard(model[0])
    fully_shard(model[3], shard_placement_fn=(lambda p: Shard(p.ndim - 1)) if columns else None)
    fully_shard(model)
    return model, MetaMD(model.named_parameters(), geometry, metric=online, momentum=0.8)


def fit_image(model, optimiser, rank, world, steps):
    for t in steps:
        optimiser.zero_grad()
        x = torch.randn(8, 1, 3, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64).chunk(world)[rank]
        (model(x) - x[:, 0, 0, :2]).square().mean().backward()
        optimiser.step()


def main():
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for case in sys.argv[4:]:
        place = folder / case
        place.mkdir(exist_ok=True)
        result = globals()[case](rank, world, place)
        torch.save(copy.deepcopy(result), place / f"{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # at an ordinary exit gloo's threads may still run on a busy machine, and the process aborts


if __name__ == "__main__":
    main()
