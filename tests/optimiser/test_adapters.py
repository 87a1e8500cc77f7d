"""Models with a frozen base: what nothing was learned for is left alone, and a `peft` model is taken as it comes."""

import warnings

import pytest
import torch
from torch import nn

import metamd
from metamd.tasks.llama import adapted


def model_with_adapters():
    torch.manual_seed(0)
    return adapted(nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3)), rank=2)


def trained(model):
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def learned_for(model):
    return metamd.LearnedOptimiser.from_potential(metamd.Kronecker().bind(trained(model)))


def steps(model, optimiser, count=3):
    tokens = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        optimiser.zero_grad()
        model(tokens).square().mean().backward()
        optimiser.step()


def test_a_frozen_base_that_nothing_was_learned_for_is_left_alone():
    whole, alone = model_with_adapters(), model_with_adapters()
    learned = learned_for(whole)
    base = {n: p.clone() for n, p in whole.named_parameters() if not p.requires_grad}
    optimiser = metamd.MetaMD(whole.named_parameters(), learned)
    steps(whole, optimiser)
    steps(alone, metamd.MetaMD(list(trained(alone).items()), learned))
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), alone.parameters(), strict=True))
    assert all(torch.equal(p, dict(whole.named_parameters())[n]) for n, p in base.items())
    assert not torch.equal(whole[2].b, torch.zeros_like(whole[2].b))
    # A state goes round, in which the frozen ones have nothing.
    again = metamd.MetaMD(whole.named_parameters(), learned)
    again.load_state_dict(optimiser.state_dict())
    steps(whole, again)


def test_what_is_trained_and_unknown_is_still_refused():
    model = model_with_adapters()
    learned = learned_for(model)
    optimiser = metamd.MetaMD(model.named_parameters(), learned)
    model[2].linear.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"the tensor '2.linear.weight' of shape \(5, 12\) has no metric"):
        steps(model, optimiser)
    with pytest.raises(ValueError, match=r"the tensor '2.linear.weight' of shape \(5, 12\) has no metric"):
        metamd.MetaMD(model.named_parameters(), learned)


def test_a_peft_model_is_taken_as_it_comes(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        config = transformers.LlamaConfig(
            vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2
        )
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_alpha=4)
        torch.manual_seed(0)
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)
    learned = learned_for(model)
    assert len(trained(model)) == 4
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimiser, schedule = metamd.prepare(model.named_parameters(), learned, steps=4)
    tokens, losses = torch.arange(12).view(2, 6), []
    for _ in range(4):
        optimiser.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in frozen.items())
