"""Language models: adapters of a pretrained one per speaker, and small ones from scratch on several kinds of text."""

import math
import re
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metamd.data.raw_files import files
from metamd.tasks.base import Drawn, Evaluation, Split
from metamd.tasks.llama import Llama, Sizes, Tokenizer, adapted, load_llama
from metamd.tasks.sources import Arrays
from metamd.tasks.supervised import Recipe, SupervisedTask, TwoSides

LEARNED_SPEAKERS = (
    *("ANGELO", "AUFIDIUS", "BUCKINGHAM", "CAMILLO", "CLARENCE", "CORIOLANUS", "DUKE VINCENTIO", "FRIAR LAURENCE"),
    *("HENRY BOLINGBROKE", "ISABELLA", "KING EDWARD IV", "KING HENRY VI", "KING RICHARD II", "LEONTES", "PAULINA"),
    *("PETRUCHIO", "QUEEN MARGARET", "ROMEO", "TRANIO", "WARWICK"),
)
"""Twenty of the 35 speakers of tinyshakespeare with 10,000 characters or more, drawn once."""

HELD_OUT_SPEAKERS = (
    *("AUTOLYCUS", "CAPULET", "COMINIUS", "DUKE OF YORK", "GLOUCESTER", "JULIET", "KING RICHARD III", "LUCIO"),
    *("MENENIUS", "MERCUTIO", "Nurse", "POLIXENES", "PROSPERO", "QUEEN ELIZABETH", "VOLUMNIA"),
)
"""The other fifteen."""

PRESIDENTS = (
    *("Adams", "Adams 1825", "Biden", "Buchanan", "Bush", "Bush 2001", "Carter", "Cleveland", "Clinton", "Coolidge"),
    *("Eisenhower", "Ford", "Garfield", "Grant", "Harding", "Harrison", "Harrison 1889", "Hayes", "Hoover", "Jackson"),
    *("Jefferson", "Johnson", "Kennedy", "Lincoln", "Madison", "McKinley", "Monroe", "Nixon", "Obama", "Pierce", "Polk"),
    *("Reagan", "Roosevelt 1933", "Taft", "Truman", "VanBuren", "Wilson"),
)
"""The presidents with 10,000 characters or more. One whose surname another had more than eight years before has his year."""

LONGEST = 40_000
"""Characters of a president that are used, from the first on: a little more than the longest speaker has."""

SHARES = (0.7, 0.1, 0.2)
"""Shares of a text for training, validation and test: one block each, in this order."""

Voices = Literal["speakers", "presidents"]
TextKind = Literal["plays", "inaugural", "union", "python"]

DOMAINS_PER_KIND: Mapping[str, int] = {"plays": 4, "inaugural": 2, "union": 4, "python": 2}
"""Into how many domains the text of a kind is cut, in its own order."""

SOURCE = 400_000
"""Characters of Python's standard library."""


# texts as tasks


class LanguageTask(SupervisedTask):
    """One training of a language model."""

    characters: Mapping[Split, float]
    """The mean number of characters of a token, by split."""

    def evaluate(self, params: Mapping[str, Tensor], split: Split = "test") -> Evaluation:
        """Nats per token, the share of tokens that were the likeliest, and bits per character of the text."""
        found = super().evaluate(params, split)
        bits = found.loss / math.log(2) / self.characters[split]
        return Evaluation(found.loss, found.accuracy, {"bits per character": bits})

    def monitor(self, examples: int = 2000) -> Callable[[Mapping[str, Tensor]], float]:
        """The loss on so many tokens of the training text: a row has many of them."""
        return super().monitor(max(1, examples // self.splits["train"][1].shape[1]))  # type: ignore[attr-defined]


class TextFamily(TwoSides):
    """Language models on texts by name; rows are `context` tokens that follow each other, the last few are left out."""

    task = LanguageTask

    def __init__(self, name: str, recipe: Recipe, sides: tuple[Sequence[str], Sequence[str]], context: int) -> None:
        if context < 2:
            raise ValueError(f"context must be at least 2 tokens, got {context}. Pass context=64, say.")
        super().__init__(name, recipe, sides)
        self.context, self._encoded = context, dict[str, tuple[Mapping[Split, Arrays], Mapping[Split, float]]]()

    def build(self, config: Mapping[str, Any]) -> SupervisedTask:
        """The task of a config, with the length of its tokens."""
        task = super().build(config)
        vars(task)["characters"] = self._encode(config["domain"])[1]
        return task

    def text(self, name: str) -> str:
        """The text of a domain."""
        raise NotImplementedError

    def tokens(self, text: str) -> tuple[list[int], Sequence[int]]:
        """The tokens of a text, and how many characters each of them has."""
        raise NotImplementedError

    def splits(self, name: str) -> Mapping[Split, Arrays]:
        """Rows of tokens, and each token's successor."""
        return self._encode(name)[0]

    def _encode(self, name: str) -> tuple[Mapping[Split, Arrays], Mapping[Split, float]]:
        if name not in self._encoded:
            tokens, lengths = self.tokens(self.text(name))
            row, found, characters = self.context, dict[Split, Arrays](), dict[Split, float]()
            ends = [round(sum(SHARES[: i + 1]) * len(tokens)) for i in range(3)]
            for split, begin, end in zip(get_args(Split), [0, *ends], ends, strict=False):
                count = (end - begin - 1) // row
                if count < 1:
                    raise ValueError(
                        f"The {split} text of {name!r} must have more than {row} tokens, got {end - begin}. Pass a smaller "
                        "context."
                    )
                part = torch.tensor(tokens[begin : begin + count * row + 1])
                found[split] = part[:-1].view(count, row), part[1:].view(count, row)
                characters[split] = sum(lengths[begin + 1 : begin + count * row + 1]) / (count * row)
            self._encoded[name] = found, characters
        return self._encoded[name]

    def _described(self) -> dict[str, Any]:
        # A hash tells texts apart that go by one name.
        hashes = {name: blake2b(self.text(name).encode(), digest_size=8).hexdigest() for name in self.domains}
        settings = {"context": self.context, "batch_size": self.recipe.batch_size, "steps": self.steps}
        return {"family": self.name, "domains": list(self.domains), **settings, "shares": list(SHARES), "texts": hashes}


# adapters per speaker


def speakers(
    *, hold_out: Voices = "speakers", rank: int = 4, context: int = 64, batch_size: int = 8, steps: int = 100
) -> "SpeakerFamily":
    """Adapt stories260K, a Llama pretrained on children's stories, to one speaker of Shakespeare by low-rank adapters.

    A task is a speaker with 10,000 characters or more, and a draw of the adapters' A; B starts at zero. Twenty speakers are
    learned from. `held_out()` has the other fifteen, or presidents with their speeches. The last fifth of a voice's text
    is for test, the tenth before it for validation. `evaluate` states bits per character.

    Args:
        hold_out: `"speakers"` or `"presidents"`.
        rank: of the adapters, one for each of the 35 matrices of the blocks.
        context: tokens in a row; each has about 1.6 characters.
        batch_size: rows per step.
        steps: T.
    """
    if hold_out not in get_args(Voices):
        raise ValueError(f"hold_out must be one of {', '.join(get_args(Voices))}, got {hold_out!r}.")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}. Pass rank=4, say.")
    return SpeakerFamily(hold_out, rank, context, batch_size, steps)


class SpeakerFamily(TextFamily):
    """See `speakers`."""

    def __init__(self, hold_out: Voices, rank: int, context: int, batch_size: int, steps: int) -> None:
        recipe = Recipe(self._model, F.cross_entropy, batch_size, steps)
        held = HELD_OUT_SPEAKERS if hold_out == "speakers" else PRESIDENTS
        super().__init__("speakers", recipe, (LEARNED_SPEAKERS, held), context)
        self.hold_out, self.rank = hold_out, rank

    def _model(self) -> nn.Module:
        return adapted(self.pretrained[0], self.rank)

    @cached_property
    def pretrained(self) -> tuple[Llama, Tokenizer]:
        """The model that is adapted, and its tokenizer."""
        paths = files("stories260k")
        model = load_llama(paths["stories260K.bin"])
        return model, Tokenizer.load(paths["tok512.bin"], model.sizes.tokens)

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """What the voices of this side say."""
        return presidents() if self.domains == PRESIDENTS else plays()

    def text(self, name: str) -> str:
        """What a voice says, in the order of the plays or of the years."""
        return self.texts[name]

    def held_out(self) -> "SpeakerFamily":
        """The held-out voices."""
        other = super().held_out()
        vars(other).pop("texts", None)  # the other side says other things
        return other

    def tokens(self, text: str) -> tuple[list[int], Sequence[int]]:
        """By the model's own tokenizer."""
        tokenizer = self.pretrained[1]
        found = tokenizer.encode(text)
        return found, [len(tokenizer.content[t].decode("utf-8", "ignore")) for t in found]

    def drawn(self) -> Drawn:
        """A voice, and the adapters' A."""
        said = super().drawn()
        return Drawn(said.domain, said.data, "the pretrained model, with adapters drawn anew", said.batches, said.domains)

    def describe(self) -> dict[str, Any]:
        """The settings, and hashes of the texts."""
        adapters = {"hold_out": self.hold_out, "model": "stories260k", "rank": self.rank}
        return {**self._described(), **adapters}


# small models from scratch


def texts(
    *,
    kinds: Sequence[TextKind] = ("plays", "inaugural", "union"),
    hold_out: TextKind | None = "union",
    width: int = 64,
    layers: int = 2,
    context: int = 64,
    batch_size: int = 16,
    steps: int = 300,
) -> "KindsFamily":
    """Train a small transformer on the characters of one text, from scratch.

    A task is a part of a text, an initialisation and an order of the batches. Kinds of text are plays (tinyshakespeare, in
    four parts), inaugural speeches (two), state-of-the-union speeches (four), and source code of Python's standard library
    (two). That code differs between versions of Python, so it is there only if `kinds` names it; `describe` has a hash.
    The last fifth of each part is for test, the tenth before it for validation. `evaluate` states bits per character.

    Args:
        kinds: of text.
        hold_out: the kind that training never sees, for `held_out()`; None holds out none.
        width: of the stream, a multiple of 16.
        layers: blocks of the transformer, each with four heads.
        context: characters in a row.
        batch_size: rows per step.
        steps: T.
    """
    if not kinds or not set(kinds) <= set(get_args(TextKind)):
        raise ValueError(f"kinds must name some of {', '.join(get_args(TextKind))}, got {tuple(kinds)}.")
    if hold_out is not None and (hold_out not in kinds or len(kinds) < 2):
        raise ValueError(f"hold_out must be one of at least two kinds {', '.join(kinds)}, got {hold_out!r}.")
    if width < 16 or width % 16:
        raise ValueError(f"width must be a multiple of 16, got {width}. Pass width=64, say.")
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}. Pass layers=2, say.")
    hidden = 8 * (width // 3)  # two thirds of four times the width, since a gated MLP has three matrices
    sizes = Sizes(width, hidden, layers, heads=4, shared_heads=4, tokens=128, context=context)
    return KindsFamily(tuple(kinds), hold_out, sizes, batch_size, steps)


class KindsFamily(TextFamily):
    """See `texts`."""

    def __init__(
        self, kinds: tuple[TextKind, ...], hold_out: TextKind | None, sizes: Sizes, batch_size: int, steps: int
    ) -> None:
        recipe = Recipe(partial(Llama, sizes), F.cross_entropy, batch_size, steps)
        domains = {k: [f"{k}-{i + 1}" for i in range(DOMAINS_PER_KIND[k])] for k in kinds}
        held = [] if hold_out is None else domains.pop(hold_out)
        super().__init__("texts", recipe, ([name for names in domains.values() for name in names], held), sizes.context)
        self.kinds, self.hold_out, self.sizes = kinds, hold_out, sizes
        self._texts: dict[str, str] = {}

    def held_out(self) -> "KindsFamily":
        """The held-out kind."""
        if self.hold_out is None:
            raise ValueError("texts was made with hold_out=None, so there is no held-out side. Name a kind.")
        return super().held_out()

    def text(self, name: str) -> str:
        """A part of the text of a kind."""
        kind, number = name.rsplit("-", 1)
        if kind not in self._texts:
            self._texts[kind] = TEXT_OF_KIND[kind]()
        whole, parts = self._texts[kind], DOMAINS_PER_KIND[kind]
        size = len(whole) // parts
        return whole[(int(number) - 1) * size : int(number) * size]

    def tokens(self, text: str) -> tuple[list[int], Sequence[int]]:
        """A token is a character of ASCII; all others are one and the same."""
        found = [min(ord(character), 127) for character in text]
        return found, [1] * len(found)

    def describe(self) -> dict[str, Any]:
        """The settings, and hashes of the texts."""
        model = {"width": self.sizes.width, "layers": self.sizes.layers}
        return {**self._described(), "kinds": list(self.kinds), "hold_out": self.hold_out, **model}


# texts


def shakespeare() -> str:
    """The text of tinyshakespeare."""
    return files("shakespeare")["tinyshakespeare.txt"].read_text(encoding="utf-8")


def plays() -> dict[str, str]:
    """What every speaker of tinyshakespeare says: speeches after a line with the name and a colon, joined by line ends."""
    found: dict[str, list[str]] = {}
    for block in shakespeare().split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if name.endswith(":") and speech:
            found.setdefault(name[:-1], []).append(speech)
    return {name: "\n".join(speeches) for name, speeches in found.items()}


def presidents() -> dict[str, str]:
    """The first speeches of every president, by surname; another of the same name, eight years later, has his year."""
    found, last, names = dict[str, list[str]](), dict[str, int](), dict[str, str]()
    for year, surname, speech in sorted([*speeches("inaugural"), *speeches("state_union")]):
        surname = surname.removeprefix("GW")
        if surname in last and year - last[surname] > 8:
            names[surname] = f"{surname} {year}"
        last[surname] = year
        found.setdefault(names.get(surname, surname), []).append(speech)
    return {name: "\n".join(speeches)[:LONGEST] for name, speeches in found.items()}


def speeches(corpus: str) -> Iterator[tuple[int, str, str]]:
    """Year, surname and text of every speech of a corpus of NLTK, in UTF-8 or in Latin-1."""
    with zipfile.ZipFile(files("speeches")[f"{corpus}.zip"]) as archive:
        for member in archive.namelist():
            if about := re.search(r"/(\d{4})-([A-Za-z]+)[^/]*\.txt$", member):
                content = archive.read(member)
                try:
                    text = content.decode()
                except UnicodeDecodeError:
                    text = content.decode("latin-1")
                yield int(about[1]), about[2], text


def _speeches(corpus: str) -> str:
    return "\n".join(text for _, _, text in sorted(speeches(corpus)))


def source_code() -> str:
    """The modules of Python's standard library, in the order of their names."""
    folder, found = Path(sysconfig.get_paths()["stdlib"]), ""
    for path in sorted(folder.glob("[a-z]*.py")):
        found += path.read_text(encoding="utf-8", errors="replace")
        if len(found) >= SOURCE:
            break
    return found[:SOURCE]


TEXT_OF_KIND: Mapping[str, Callable[[], str]] = {
    "plays": shakespeare,
    "inaugural": partial(_speeches, "inaugural"),
    "union": partial(_speeches, "state_union"),
    "python": source_code,
}
"""The whole text of a kind."""
