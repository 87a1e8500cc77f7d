"""Potentials: the convex functions whose Bregman divergences measure the length of a step."""

from metamd.potentials.base import Active, Move, Params, Potential, Step, StrongConvexity, bregman, mirror_step
from metamd.potentials.classical import Euclidean, NegativeEntropy, PNorm
from metamd.potentials.diagonal import Diagonal, Kronecker, MaxDiagonal

__all__ = [
    "Active",
    "Diagonal",
    "Euclidean",
    "Kronecker",
    "MaxDiagonal",
    "Move",
    "NegativeEntropy",
    "PNorm",
    "Params",
    "Potential",
    "Step",
    "StrongConvexity",
    "bregman",
    "mirror_step",
]
