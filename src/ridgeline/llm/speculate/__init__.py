"""Speculative decoding: a cheap draft guesses tokens, the target checks them all in one pass, and the output is the target's own.

draft.py      what a draft is           ngram.py · model_draft.py · layer_skip.py   the three kinds (rollout.py: the loop of the last two)
accept.py     the exact rule            adaptive.py   how far to look ahead, when to stop     counters.py   what happened
speculator.py the engine's handle       choose.py     "ngram", "layers:4" or a model's name to a draft
"""

from __future__ import annotations

from .accept import accept, accept_batch
from .adaptive import Adaptive
from .choose import make_draft
from .counters import Counters
from .draft import Draft, Proposal
from .layer_skip import LayerSkipDraft
from .model_draft import ModelDraft
from .ngram import NgramDraft
from .speculator import Speculator

__all__ = [
    "Adaptive",
    "Counters",
    "Draft",
    "LayerSkipDraft",
    "ModelDraft",
    "NgramDraft",
    "Proposal",
    "Speculator",
    "accept",
    "accept_batch",
    "make_draft",
]
