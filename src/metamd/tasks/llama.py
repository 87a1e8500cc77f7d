"""A small Llama, its published file format, its tokenizer, and low-rank adapters.

The format is the legacy one of llama2.c: seven int32, then float32 tensors. The tokenizer is byte-pair encoding as
sentencepiece does it: among neighbours that are a token together, those with the best score are merged first.
"""

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.data.registry import DataError
from metamd.files.limits import read_regular

BYTES = 3
"""Token 3 + b stands for the byte b, in a text with characters that have no token."""

LARGEST = 2**30
"""The most bytes of a model or tokenizer that are read."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide the shapes of a model's tensors."""

    width: int
    hidden: int
    layers: int
    heads: int
    shared_heads: int  # pairs of keys and values, each of which serves heads / shared_heads heads
    tokens: int
    context: int


class Llama(nn.Module):
    """A transformer as Llama has it: RMSNorm before each part, rotary positions, SwiGLU, shared embeddings [Touvron2023].

    Args:
        sizes: of its tensors.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.width)
        # As GPT-2 draws them: what is added to the stream is smaller, by the number of additions.
        for name, p in self.named_parameters():
            if p.ndim == 2:
                added = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * sizes.layers) if added else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: (batch, tokens of the vocabulary, time), as `cross_entropy` takes them."""
        stream = self.embedding(tokens)
        turns = rotations(tokens.shape[1], self.sizes.width // self.sizes.heads, stream)
        for block in self.blocks:
            stream = block(stream, turns)
        return (self.norm(stream) @ self.embedding.weight.T).transpose(1, 2)


class DecoderBlock(nn.Module):
    """Attention and a gated MLP, each added to the stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.shared_heads = sizes.heads, sizes.shared_heads
        narrow = sizes.width // sizes.heads * sizes.shared_heads
        self.attention_norm, self.mlp_norm = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.wq = nn.Linear(sizes.width, sizes.width, bias=False)
        self.wk = nn.Linear(sizes.width, narrow, bias=False)
        self.wv = nn.Linear(sizes.width, narrow, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)
        self.w1 = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.w3 = nn.Linear(sizes.width, sizes.hidden, bias=False)

    def forward(self, stream: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """The stream with both added."""
        stream = stream + self._attention(self.attention_norm(stream), turns)
        inner = self.mlp_norm(stream)
        return stream + self.w2(F.silu(self.w1(inner)) * self.w3(inner))

    def _attention(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        batch, time, _ = x.shape
        q = rotary(self.wq(x).view(batch, time, self.heads, -1), turns).transpose(1, 2)
        k = rotary(self.wk(x).view(batch, time, self.shared_heads, -1), turns).transpose(1, 2)
        v = self.wv(x).view(batch, time, self.shared_heads, -1).transpose(1, 2)
        # Heads h * n .. h * n + n - 1 share the keys and values h. The products are spelled out: torch's fused attention
        # has no second derivatives, which estimators need.
        q = q.reshape(batch, self.shared_heads, -1, q.shape[-1])  # the heads of a pair one after the other
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        steps = torch.arange(time, device=x.device)
        ahead = (steps[None] > steps[:, None]).repeat(self.heads // self.shared_heads, 1)
        mixed = scores.masked_fill(ahead, -math.inf).softmax(3) @ v
        return self.wo(mixed.reshape(batch, self.heads, time, -1).transpose(1, 2).reshape(batch, time, -1))


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + 1e-5), times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised stream."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Adapter(nn.Module):
    """A frozen linear map W and a low-rank one beside it: W x + (alpha / rank) B A x, A random and B = 0 [Hu2022].

    Args:
        linear: the map; its weight stops requiring a gradient.
        rank: of B A.
        alpha: as published; the rate of A and B need not change with the rank.
    """

    def __init__(self, linear: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        bound = 1 / math.sqrt(linear.in_features)
        self.a = nn.Parameter(torch.empty(rank, linear.in_features).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Both maps together."""
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def adapted(model: nn.Module, rank: int = 4, alpha: float = 8.0) -> nn.Module:
    """The model with an adapter for every `nn.Linear`, and all else frozen. The weights are shared with `model`."""
    shared: dict[int, object] = {id(p): p for p in model.parameters()}
    other = copy.deepcopy(model, shared).requires_grad_(False)
    for module in list(other.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Adapter(child, rank, alpha))
    return other


def rotations(time: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of t * 10000^(-2i / size), (time, 1, size / 2)."""
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=like.dtype) / size)
    angles = torch.arange(time, device=like.device, dtype=like.dtype)[:, None, None] * rates
    return angles.cos(), angles.sin()


def rotary(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Neighbours (x_2i, x_2i+1) turned by the angle of their place; x is (batch, time, heads, size)."""
    cosine, sine = turns
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2)


def load_llama(path: Path) -> Llama:
    """A model in the legacy format of llama2.c, without gradients."""
    content = read_regular(path, LARGEST)
    if len(content) < 28:
        raise DataError(f"{path} must begin with seven sizes, got {len(content)} bytes. Fetch it again.")
    numbers = [int(n) for n in np.frombuffer(content, "<i4", 7)]
    sizes = Sizes(*numbers)
    if min(numbers) < 1 or sizes.width % sizes.heads or sizes.heads % sizes.shared_heads:
        raise DataError(
            f"{path} must have positive sizes that divide each other and outputs shared with the embeddings, got {sizes}."
        )
    narrow = sizes.width // sizes.heads * sizes.shared_heads
    shapes = {
        "attention_norm": (sizes.width,),
        "wq": (sizes.width, sizes.width),
        "wk": (narrow, sizes.width),
        "wv": (narrow, sizes.width),
        "wo": (sizes.width, sizes.width),
        "mlp_norm": (sizes.width,),
        "w1": (sizes.hidden, sizes.width),
        "w2": (sizes.width, sizes.hidden),
        "w3": (sizes.hidden, sizes.width),
    }
    layers = sizes.layers * sum(math.prod(shape) for shape in shapes.values())
    count = sizes.tokens * sizes.width + layers + sizes.width
    # Tables of cosines and sines follow, which are computed here.
    if len(content) != 28 + 4 * (count + sizes.context * (sizes.width // sizes.heads)):
        raise DataError(f"{path} must have {count:,} weights for {sizes}, got {len(content):,} bytes. Fetch it again.")
    values = torch.from_numpy(np.frombuffer(content, "<f4", count, 28).astype(np.float32))
    found, at = {"embedding.weight": values[: sizes.tokens * sizes.width].view(sizes.tokens, -1)}, sizes.tokens * sizes.width
    for name, shape in shapes.items():
        for layer in range(sizes.layers):
            found[f"blocks.{layer}.{name}.weight"] = values[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
    found["norm.weight"] = values[at:]
    with torch.random.fork_rng(devices=()):
        model = Llama(sizes)
    model.load_state_dict(found)
    return model.requires_grad_(False)


class Tokenizer:
    """Byte-pair encoding with scores, bytes where a character has no token.

    Args:
        pieces: the bytes of every token; that of a byte is "<0x0A>", say.
        scores: which merge comes first: the highest.
    """

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]) -> None:
        self.pieces, self.scores = tuple(pieces), tuple(scores)
        # Without the first three, which stand for no text: unknown, beginning and end.
        self.ids = {piece: i for i, piece in reversed(list(enumerate(pieces))) if i >= BYTES}
        self._words: dict[str, list[int]] = {}

    @classmethod
    def load(cls, path: Path, tokens: int) -> "Tokenizer":
        """So many tokens from a file of llama2.c: for each a score, a length and its bytes."""
        content, at, pieces, scores = read_regular(path, LARGEST), 4, list[bytes](), list[float]()
        for _ in range(tokens):
            head = content[at : at + 8]
            length = int.from_bytes(head[4:], "little", signed=True)
            if len(head) < 8 or length < 0 or at + 8 + length > len(content):
                raise DataError(f"{path} must hold {tokens} tokens, got {len(pieces)} whole ones. Fetch it again.")
            scores.append(float(np.frombuffer(head[:4], "<f4")[0]))
            pieces.append(content[at + 8 : at + 8 + length])
            at += 8 + length
        return cls(pieces, scores)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, which begins with a space as sentencepiece adds one; no token for the beginning."""
        found: list[int] = []
        for word in self._words_of.findall(f" {text}"):
            if word not in self._words:
                self._words[word] = self._merged(word)
            found += self._words[word]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text is left out."""
        return b"".join(self.content[t] for t in tokens).decode("utf-8", "replace")

    @cached_property
    def content(self) -> tuple[bytes, ...]:
        """The bytes that every token stands for."""
        marks = [re.fullmatch(rb"<0x([0-9A-F]{2})>", piece) for piece in self.pieces]
        plain = [bytes([int(m[1], 16)]) if m else p for p, m in zip(self.pieces, marks, strict=True)]
        return (b"", b"", b"", *plain[BYTES:])

    @cached_property
    def _words_of(self) -> "re.Pattern[str]":
        """Parts of a text that no merge joins, which makes long texts quick: words with the spaces before them."""
        # A token with a space, line end or tab after another character could join two words.
        joins = any(re.search(rb"[^ ] |[^\n]\n|\n[^\n]", piece) for piece in self.ids)
        return re.compile("(?s).+" if joins else r" *[^ \n]+| +|\n+")

    def _merged(self, word: str) -> list[int]:
        tokens: list[int] = []
        for character in word:
            body = character.encode()
            tokens += [self.ids[body]] if body in self.ids else [BYTES + byte for byte in body]
        while True:
            best, place, into = -math.inf, -1, -1
            for i in range(len(tokens) - 1):
                both = self.ids.get(self.pieces[tokens[i]] + self.pieces[tokens[i + 1]])
                if both is not None and self.scores[both] > best:
                    best, place, into = self.scores[both], i, both
            if place < 0:
                return tokens
            tokens[place : place + 2] = [into]
