"""Language models: the Llama and its file, the tokenizer, adapters, and both families of texts."""

import io
import itertools
import math
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from metamd.data.registry import DataError
from metamd.tasks import speakers, texts
from metamd.tasks.language import HELD_OUT_SPEAKERS, LEARNED_SPEAKERS, PRESIDENTS, plays, presidents, source_code
from metamd.tasks.llama import Llama, Sizes, Tokenizer, adapted, load_llama
from tests.loopback import needs_files
from tests.task_laws import LAWS, draw
from tests.tiny_datasets import publish_files

BOS = 1
"""The token that begins a text."""

SIZES = Sizes(width=8, hidden=12, layers=2, heads=4, shared_heads=2, tokens=300, context=16)
ORDER = ("attention_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w1", "w2", "w3")


def written(model):
    """A model in the legacy format of llama2.c."""
    s, state = model.sizes, model.state_dict()
    parts = [state["embedding.weight"]]
    parts += [state[f"blocks.{i}.{name}.weight"] for name in ORDER for i in range(s.layers)]
    parts += [state["norm.weight"], torch.zeros(s.context * (s.width // s.heads))]
    head = struct.pack("<7i", s.width, s.hidden, s.layers, s.heads, s.shared_heads, s.tokens, s.context)
    return head + b"".join(p.numpy().astype("<f4").tobytes() for p in parts)


def pieces():
    """Bytes, then a few letters and words, the longest merges with the best scores."""
    plain = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % i for i in range(256))]
    words = [*(c.encode() for c in " abcdehlort"), b"th", b" t", b" th", b"he", b" the", b"or", b"all", b"al", "é".encode()]
    words += [b"unused"] * (300 - len(plain) - len(words))
    return plain + words, [0.0] * len(plain) + [-float(i) for i in range(len(words))]


def packed(tokens, scores):
    return struct.pack("<i", max(map(len, tokens))) + b"".join(
        struct.pack("<fi", score, len(token)) + token for token, score in zip(tokens, scores, strict=True)
    )


def model_of(seed=0, layers=2):
    torch.manual_seed(seed)
    model = Llama(replace(SIZES, layers=layers))
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model.requires_grad_(False)


def zipped(members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return content.getvalue()


def babble(seed, words=90):
    generator = np.random.default_rng(seed)
    return " ".join(generator.choice(["the", "all", "hold", "order", "there", "or", "called"], words))


def sources(length=1, layers=2):
    """Every speaker and president with a little to say."""
    words = 45 * length
    lines = [
        f"{name}:\n{babble(i, words)}\n\n{name}:\n{babble(i, words)}"
        for i, name in enumerate((*LEARNED_SPEAKERS, *HELD_OUT_SPEAKERS))
    ]
    years = {"Adams": 1797, "Harrison": 1841, "Bush": 1989}
    spoken = {"c/1905-Roosevelt.txt": "Short."}
    for i, name in enumerate(PRESIDENTS):
        surname, _, year = name.partition(" ")
        surname = "GWBush" if name == "Bush 2001" else surname
        spoken[f"c/{year or years.get(surname, 1900)}-{surname}.txt"] = babble(i)
    early = dict(list(spoken.items())[::2])
    late = {name: body for name, body in spoken.items() if name not in early}
    return {
        "stories260k": {"stories260K.bin": written(model_of(layers=layers)), "tok512.bin": packed(*pieces())},
        "shakespeare": {"tinyshakespeare.txt": "\n\n".join(lines).encode()},
        "speeches": {"inaugural.zip": zipped({**early, "c/README": "no"}), "state_union.zip": zipped(late)},
    }


@pytest.fixture
def library(tmp_path, monkeypatch):
    publish_files(tmp_path, monkeypatch, **sources())


# the model


def slow_logits(model, tokens):
    """The same model, one head and one place at a time, in double precision."""
    state = {n: p.double() for n, p in model.state_dict().items()}
    s = model.sizes
    size, each = s.width // s.heads, s.heads // s.shared_heads

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def turned(x, place):
        out = x.clone()
        for i in range(0, size, 2):
            angle = place / 10000 ** (i / size)
            out[i] = x[i] * math.cos(angle) - x[i + 1] * math.sin(angle)
            out[i + 1] = x[i] * math.sin(angle) + x[i + 1] * math.cos(angle)
        return out

    stream = state["embedding.weight"][tokens]
    for layer in range(s.layers):
        w = {name: state[f"blocks.{layer}.{name}.weight"] for name in ORDER}
        x = norm(stream, w["attention_norm"])
        out = torch.zeros_like(stream)
        for h in range(s.heads):
            mine, shared = slice(h * size, (h + 1) * size), slice(h // each * size, (h // each + 1) * size)
            q = [turned(w["wq"][mine] @ row, t) for t, row in enumerate(x)]
            k = [turned(w["wk"][shared] @ row, t) for t, row in enumerate(x)]
            for t in range(len(tokens)):
                weights = torch.stack([q[t] @ k[u] / math.sqrt(size) for u in range(t + 1)]).softmax(0)
                out[t, mine] = sum(a * (w["wv"][shared] @ x[u]) for u, a in enumerate(weights))
        stream = stream + out @ w["wo"].T
        x = norm(stream, w["mlp_norm"])
        gate = x @ w["w1"].T
        stream = stream + (gate * gate.sigmoid() * (x @ w["w3"].T)) @ w["w2"].T
    return norm(stream, state["norm.weight"]) @ state["embedding.weight"].T


def test_the_model_is_the_published_one(tmp_path):
    model = model_of()
    tokens = torch.randint(300, (2, 7), generator=torch.Generator().manual_seed(1))
    for row, logits in zip(tokens, model(tokens), strict=True):
        torch.testing.assert_close(logits.T, slow_logits(model, row).float(), rtol=1e-4, atol=1e-4)
    (tmp_path / "model.bin").write_bytes(written(model))
    torch.testing.assert_close(load_llama(tmp_path / "model.bin")(tokens), model(tokens), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: b[:20], "must begin with seven sizes, got 20 bytes"),
        (lambda b: b[:-4], "must have .* weights"),
        (lambda b: b + b"....", "must have .* weights"),
        (lambda b: struct.pack("<i", 7) + b[4:], "sizes that divide each other"),
        (lambda b: b[:20] + struct.pack("<i", -300) + b[24:], "outputs shared with the embeddings"),
    ],
)
def test_broken_models_are_refused(change, sentence, tmp_path):
    (tmp_path / "model.bin").write_bytes(change(written(model_of())))
    with pytest.raises(DataError, match=sentence):
        load_llama(tmp_path / "model.bin")


# the tokenizer


def slow_tokens(tokenizer, text):
    """Merges over the whole text, as sentencepiece defines them."""
    ids = {piece: i for i, piece in reversed(list(enumerate(tokenizer.pieces)))}
    tokens = []
    for character in " " + text:
        body = character.encode()
        tokens += [ids[body]] if body in ids else [3 + byte for byte in body]
    while True:
        joined = [ids.get(tokenizer.pieces[a] + tokenizer.pieces[b]) for a, b in itertools.pairwise(tokens)]
        known = [(tokenizer.scores[into], -i, into) for i, into in enumerate(joined) if into is not None]
        if not known:
            return tokens
        _, place, into = max(known)
        tokens[-place : 2 - place] = [into]


def test_merges_are_those_of_the_definition(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(packed(*pieces()))
    tokenizer = Tokenizer.load(tmp_path / "tokens.bin", 300)
    for text in ("the other", "all  the\n\nthere \n hall\té€x", "", " "):
        found = tokenizer.encode(text)
        assert found == slow_tokens(tokenizer, text)
        assert tokenizer.decode([BOS, *found]) == f" {text}"
    assert tokenizer.encode("the") == [tokenizer.pieces.index(b" the")]
    joining = Tokenizer([*tokenizer.pieces, b"e a"], [*tokenizer.scores, 5.0])
    text = "the all of the allotted"
    joining = Tokenizer([*joining.pieces, b" a"], [*joining.scores, 6.0])
    assert joining.encode(text) == slow_tokens(joining, text)
    (tmp_path / "tokens.bin").write_bytes(packed(*pieces())[:-3])
    with pytest.raises(DataError, match="must hold 300 tokens, got 299 whole ones"):
        Tokenizer.load(tmp_path / "tokens.bin", 300)


# adapters


def test_adapters_begin_at_the_model_and_move_it():
    model, tokens = model_of(), torch.arange(6)[None]
    changed = adapted(model, rank=2, alpha=4.0)
    assert torch.equal(changed(tokens), model(tokens))
    trained = {n: p for n, p in changed.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * SIZES.layers
    assert changed.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    adapter = changed.blocks[0].wq
    with torch.no_grad():
        adapter.b.normal_(generator=torch.Generator().manual_seed(0))
    merged = model_of()
    with torch.no_grad():
        merged.blocks[0].wq.weight += 4.0 / 2 * adapter.b @ adapter.a
    torch.testing.assert_close(changed(tokens), merged(tokens))
    assert not torch.allclose(changed(tokens), model(tokens))


# families


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_families_keep_the_laws(law):
    for make in (small_speakers, small_texts):
        assert law(make()), make.__name__


def small_speakers(**options):
    return speakers(**{"rank": 2, "context": 6, "batch_size": 2, "steps": 5, **options})


def small_texts(**options):
    return texts(**{"width": 16, "layers": 1, "context": 6, "batch_size": 2, "steps": 5, **options})


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("make", [small_speakers, small_texts, lambda: small_speakers(hold_out="presidents")])
def test_splits_are_blocks_that_follow_each_other(make):
    for family in (make(), make().held_out()):
        config = family.sample(torch.Generator().manual_seed(3))
        task = family.build(config)
        tokens, lengths = family.tokens(family.text(config["domain"]))
        for split, begin, end in (("train", 0.0, 0.7), ("validation", 0.7, 0.8), ("test", 0.8, 1.0)):
            at = round(begin * len(tokens))
            inputs, targets = task.splits[split]
            assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
            assert inputs.flatten().tolist() == tokens[at : at + inputs.numel()]
            assert inputs.numel() == pytest.approx((end - begin) * len(tokens), abs=8)
        found, wanted = task.evaluate(task.init()), task.splits["test"][1]
        characters = sum(lengths[at + 1 : at + 1 + wanted.numel()])
        bits = found.loss * wanted.numel() / math.log(2) / characters
        assert found.measures["bits per character"] == pytest.approx(bits, rel=1e-5)
        assert 0 <= found.accuracy <= 1


@pytest.mark.usefixtures("library")
def test_sides_have_their_own_voices():
    family = small_speakers()
    assert (len(family.domains), family.held_out().domains) == (20, HELD_OUT_SPEAKERS)
    other = small_speakers(hold_out="presidents").held_out()
    assert other.domains == PRESIDENTS
    assert set(presidents()) == {*PRESIDENTS, "Roosevelt"}
    assert set(plays()) == {*LEARNED_SPEAKERS, *HELD_OUT_SPEAKERS}
    with pytest.raises(ValueError, match="asks for the domain 'ROMEO'"):
        other.build({"family": "speakers", "domain": "ROMEO", "init_seed": 1, "batch_seed": 1})
    assert small_texts(hold_out="plays").held_out().domains == tuple(f"plays-{i}" for i in range(1, 5))
    with pytest.raises(ValueError, match="made with hold_out=None"):
        small_texts(hold_out=None).held_out()


def test_a_text_of_source_code_is_at_hand_everywhere():
    family = small_texts(kinds=("python", "plays"), hold_out="plays")
    assert len(source_code()) == 400_000
    assert family.describe()["texts"].keys() == {"python-1", "python-2"}


@pytest.mark.usefixtures("library")
def test_a_text_that_is_too_short_is_named():
    with pytest.raises(ValueError, match=r"The validation text of '.*' must have more than 100 tokens"):
        draw(small_speakers(context=100, batch_size=1))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: speakers(hold_out="singers"), "hold_out must be one of speakers, presidents"),
        (lambda: speakers(rank=0), "rank must be at least 1"),
        (lambda: speakers(context=1), "context must be at least 2"),
        (lambda: texts(kinds=("songs",)), "kinds must name some of plays"),
        (lambda: texts(hold_out="python"), "hold_out must be one of at least two kinds plays, inaugural, union"),
        (lambda: texts(width=60), "multiple of 16"),
        (lambda: texts(layers=0), "layers must be at least 1"),
    ],
)
def test_bad_input_is_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


# the real data


def greedy(model, tokens, steps):
    """The tokens with the likeliest next ones appended, one by one."""
    found = list(tokens)
    with torch.no_grad():
        for _ in range(steps):
            found.append(int(model(torch.tensor([found[-model.sizes.context :]]))[0, :, -1].argmax()))
    return found


@pytest.mark.real_data
def test_the_pretrained_model_tells_its_story():
    needs_files("stories260k")
    model, tokenizer = speakers().pretrained
    told = tokenizer.decode(greedy(model, [BOS, *tokenizer.encode("Once upon a time")], 20))
    story = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    assert story.startswith(told.strip())
    assert len(told) > 60


@pytest.mark.real_data
def test_voices_are_those_with_enough_text():
    needs_files("shakespeare", "speeches")
    everything = plays()
    assert {name for name, text in everything.items() if len(text.replace("\n", "")) >= 9_700} >= {
        *LEARNED_SPEAKERS,
        *HELD_OUT_SPEAKERS,
    }
    assert len(everything) > 250
    found = presidents()
    assert sorted(name for name, text in found.items() if len(text) >= 10_000) == sorted(PRESIDENTS)
    assert max(map(len, found.values())) == 40_000


@pytest.mark.real_data
def test_a_step_of_adam_adapts_a_voice():
    needs_files("stories260k", "shakespeare")
    task = draw(speakers().held_out())
    params = {n: x.requires_grad_() for n, x in task.init().items()}
    optimiser = torch.optim.Adam(params.values(), lr=1e-2)
    before = task.evaluate(params).measures["bits per character"]
    for step in range(10):
        optimiser.zero_grad()
        task.loss(params, task.batch(step)).backward()
        optimiser.step()
    assert 1.5 < task.evaluate(params).measures["bits per character"] < before - 0.3
