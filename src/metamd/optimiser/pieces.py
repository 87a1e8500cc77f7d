"""A record of the active piece of every step, kept as runs so that a million steps stay small."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PieceRecord:
    """Pieces and for how many steps each stayed active.

    Example:
        >>> record = PieceRecord()
        >>> for piece in (0, 0, 2):
        ...     record.append(piece)
        >>> record.encode(), record.expand()
        ('0x2 2x1', tensor([0, 0, 2]))
    """

    runs: list[list[int]] = field(default_factory=list)

    def append(self, piece: int) -> None:
        """Note the piece of one more step."""
        if self.runs and self.runs[-1][0] == piece:
            self.runs[-1][1] += 1
        else:
            self.runs.append([piece, 1])

    def expand(self) -> Tensor:
        """One integer per step."""
        pieces = torch.tensor([p for p, _ in self.runs], dtype=torch.int64)
        return pieces.repeat_interleave(torch.tensor([n for _, n in self.runs], dtype=torch.int64))

    def encode(self) -> str:
        """The runs as text, for a state_dict: a leaf of any length, which distributed checkpoints need."""
        return " ".join(f"{p}x{n}" for p, n in self.runs)

    @classmethod
    def decode(cls, text: str) -> "PieceRecord":
        """The record that was encoded."""
        return cls([[int(x) for x in run.split("x")] for run in text.split()])
