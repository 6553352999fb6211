"""Single-shot inference for DeepSeek-V4 (Flash and Pro) checkpoints on one node of 1 to 8 GPUs.

Dimension key, used as suffixes of tensor names (``q_THD``, ``logits_TV``) throughout the package:

``T`` tokens of this step · ``S`` cache slots · ``C`` compressed entries · ``K`` selected entries ·
``N`` listed key rows · ``H`` heads · ``I`` index heads · ``D`` head dim · ``R`` rope dims or low
rank · ``G`` output groups · ``W`` compressor width · ``E`` model dim · ``F`` expert inner dim ·
``X`` experts · ``P`` experts per token · ``M`` residual streams · ``V`` vocabulary.

In a product ``N`` and ``K`` are the rows and the columns of its weight (``x_TK``, ``q_TN``). A
digit is a size: ``position_1`` has one element. A letter that means something else in one place is
explained there.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.config import ModelConfig
    from dsv4.engine import Engine
    from dsv4.engine_config import EngineConfig
    from dsv4.errors import UserError
    from dsv4.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = ["Engine", "EngineConfig", "ModelConfig", "SamplingParams", "UserError"]

_MODULES = {
    "Engine": "dsv4.engine",
    "EngineConfig": "dsv4.engine_config",
    "ModelConfig": "dsv4.config",
    "SamplingParams": "dsv4.sampling",
    "UserError": "dsv4.errors",
}


def __getattr__(name: str) -> object:
    """A public name, whose module is imported when it is first asked for: ``dsv4 --help`` needs no
    torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
