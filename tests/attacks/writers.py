"""Writers of hostile files: each takes a path, or a folder, and writes what a reader must refuse quickly and in a sentence.

`LEARNED` is for what `metamd.load` reads; the same bytes are offered to every other reader of containers.
"""

import io
import json
import lzma
import os
import zipfile
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

import metamd
from metamd.files.container import checksum, pack
from metamd.files.learned import LEARNED as KIND
from tests.frozen.problems import path_of

SOURCE = "quadratic-diagonal"


def raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file of these bytes."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


def forged(path: Path, **fields) -> None:
    """A learned file with some fields of its header replaced, and the right checksum: a careful forgery."""
    source = path_of(SOURCE)
    learned = metamd.load(source)
    text = json.dumps(learned.header.to_dict() | fields)
    digest = checksum(f"{learned.fingerprint()}\n{text}", {})
    path.write_bytes(pack(safetensors.torch.load_file(source), {KIND.key: text, KIND.seal: digest}))


def sparse(path: Path, *, described: bool) -> None:
    """A file that claims 128 GiB and takes no room on the disk."""
    table = {"x": {"dtype": "F64", "shape": [2**34], "data_offsets": [0, 2**37]}}
    header = json.dumps(({"__metadata__": {KIND.key: "{}", KIND.seal: "0"}} if described else {}) | table).encode()
    raw(path, header)
    os.truncate(path, 8 + len(header) + 2**37)


def entries(count: int, *, repeat: bool = False) -> bytes:
    return ("{" + ",".join(f'"k{i}":1' for i in range(count)) + (',"k0":1' if repeat else "") + "}").encode()


LONG = "x" * 500_000
USAGE = {"metric": "learned", "momentum": 0.0, "schedule": "constant", "factor": 1.0}
ONLINE = {"rule": "average", "beta": 0.9, "epsilon": 1e-8, "refresh": 1, "scale": {}}

LEARNED = {
    "nothing": lambda p: p.write_bytes(b""),
    "seven bytes": lambda p: p.write_bytes(b"1234567"),
    "a header longer than the file": lambda p: raw(p, b"{}", length=1000),
    "a header of 2^63 bytes": lambda p: raw(p, b"{}", length=2**63),
    "a pickle": lambda p: torch.save({"x": torch.zeros(2)}, p),
    "60,000 keys, one of them twice": lambda p: raw(p, entries(60_000, repeat=True)),
    "500,000 keys": lambda p: raw(p, entries(500_000)),
    "sparse, without metadata": lambda p: sparse(p, described=False),
    "sparse, with metadata": lambda p: sparse(p, described=True),
    "120,000 empty tensors": lambda p: raw(
        p,
        json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(110_000)}).encode()[
            : 8 * 2**20
        ],
    ),
    "30,000 empty tensors": lambda p: p.write_bytes(
        pack({f"t{i}": torch.zeros(0) for i in range(30_000)}, {KIND.key: "{}", KIND.seal: ""})
    ),
    "deep header": lambda p: raw(p, b"[" * 100_000),
    "deep metadata": lambda p: p.write_bytes(pack({"x": torch.zeros(1)}, {KIND.key: "[" * 100_000, KIND.seal: ""})),
    "a million digits": lambda p: raw(p, b'{"x":' + b"1" * 1_000_000 + b"}"),
    "half a surrogate": lambda p: raw(p, b'{"__metadata__":{"metamd":"\\ud800"}}'),
    "overlapping tensors": lambda p: raw(
        p, json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}).encode(), bytes(8)
    ),
    "a negative shape": lambda p: raw(p, b'{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,0]}}'),
    "a shape that overflows": lambda p: raw(
        p, b'{"x":{"dtype":"F32","shape":[4294967296,8589934592],"data_offsets":[0,0]}}'
    ),
    "300,000 keys in family": lambda p: forged(p, family={f"k{i}": i for i in range(300_000)}),
    "a long field": lambda p: forged(p, **{LONG: 1}),
    "a long tying": lambda p: forged(p, tying=LONG),
    "a long metric": lambda p: forged(p, usage=USAGE | {"metric": LONG}),
    "many knots": lambda p: forged(p, usage=USAGE | {"schedule": "learned", "knots": [0.5] * 100_000}),
    "a long rule": lambda p: forged(p, online=ONLINE | {"rule": LONG}),
    "long keys": lambda p: forged(p, tensors=[{"key": LONG, "shape": [1, 2]}]),
    "a long scale": lambda p: forged(p, gradient_scale={LONG: 1.0}),
    "a momentum that is a text": lambda p: forged(p, usage=USAGE | {"momentum": "0.9"}),
    "an infinite horizon": lambda p: forged(p, horizon=2**70),
    "a nested shape": lambda p: forged(p, model=[{"name": "theta", "shape": [[2]]}]),
    "weights of the runs that are texts": lambda p: forged(p, learned_from={"prior": 0, "runs": [{"weight": "x"}]}),
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path)


NO_FILES = {"a pipe": pipe, "a device": link_to_device, "a link to itself": loop, "a folder": Path.mkdir}

JSON = {
    "nothing": b"",
    "no JSON": b"\x00\xff\xfe{",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "500,000 keys": entries(500_000),
    "a key twice": entries(60_000, repeat=True),
    "a list": b"[1, 2]",
    "NaN": b'{"settings": NaN}',
    "a million digits": b'{"settings": ' + b"1" * 1_000_000 + b"}",
    "a long text": b'{"format": 1, "settings": {"a": "' + b"x" * 500_000 + b'"}}',
}


def archive(path: Path, *lines: object) -> None:
    """The archive of an experiment, with these lines."""
    path.write_bytes(lzma.compress("\n".join(json.dumps(line) for line in lines).encode()))


def bomb(path: Path) -> None:
    """A few hundred kilobytes that unpack to 2 GiB."""
    packer = lzma.LZMACompressor(preset=0)
    with path.open("wb") as file:
        for _ in range(2048):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())


RUN = {"folder": ".", "run": {"format": 1, "settings": {}}}
ARCHIVES = {
    "no archive": lambda p: p.write_bytes(b"\xfd7zXZ\x00 and nothing else"),
    "cut short": lambda p: p.write_bytes(lzma.compress(json.dumps(RUN).encode())[:-8]),
    "a line of 100,000 brackets": lambda p: p.write_bytes(lzma.compress(b"[" * 100_000)),
    "a folder elsewhere": lambda p: archive(p, RUN | {"folder": "../../elsewhere"}),
    "an absolute folder": lambda p: archive(p, RUN | {"folder": "/elsewhere"}),
    "no folder": lambda p: archive(p, {"run": {}}),
    "a line that is a list": lambda p: archive(p, [1]),
    "a long folder": lambda p: archive(p, RUN, {"folder": "x" * 500_000, "cell": "a", "result": {}}),
    "a cell that is a number": lambda p: archive(p, RUN, {"folder": ".", "cell": 5, "result": {}}),
}


def npz(path: Path, *, shape: tuple[int, ...] = (4, 2), content: bytes | None = None, **arrays) -> None:
    """An .npz file whose array `inputs` says it has a shape, and has other bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("inputs.npy", header.getvalue() + (content if content is not None else b""))
        for name, value in arrays.items():
            with out.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, np.asarray(value), allow_pickle=True)


NPZ = {
    "nothing": lambda p: p.write_bytes(b""),
    "no archive": lambda p: p.write_bytes(b"inputs and targets"),
    "cut short": lambda p: (np.savez(p, inputs=np.zeros((9, 2)), targets=np.zeros(9)), os.truncate(p, 200)),
    "an array of 2^60 numbers": lambda p: npz(p, shape=(2**60,), targets=np.zeros(4)),
    "an array that ends early": lambda p: npz(p, shape=(1000, 2), content=bytes(8), targets=np.zeros(1000)),
    "objects": lambda p: npz(p, content=bytes(64), targets=np.array([{}, None], dtype=object)),
    "other names": lambda p: np.savez(p, a=np.zeros(3)),
    "a long name": lambda p: np.savez(p, **{"n" * 60_000: np.zeros(3)}),
    "no array inside": lambda p: zipfile.ZipFile(p, "w").close(),
}
