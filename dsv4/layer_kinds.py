"""What a layer is called by its compress ratio."""

from dsv4.config import CSA_RATIO, HCA_RATIO, SLIDING_WINDOW_ONLY, ModelConfig

KIND_OF_RATIO = {SLIDING_WINDOW_ONLY: "SWA", CSA_RATIO: "CSA", HCA_RATIO: "HCA"}


def layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kind of every layer: sliding window attention alone, compressed sparse, heavily compressed."""
    return tuple(KIND_OF_RATIO[ratio] for ratio in config.compress_ratios)
