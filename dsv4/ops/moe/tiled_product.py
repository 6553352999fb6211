"""A product of the experts, tile by tile of their rows."""

from dataclasses import dataclass

from dsv4.integers import ceil_div
from dsv4.launch.kernel import Shape
from dsv4.ops.linear.prefill import Build, Tile
from dsv4.ops.moe.sorted_pairs import Tiling


@dataclass(frozen=True)
class TiledProduct:
    """An entry of a GEMM for a weight of so many rows, and its build for every tile."""

    function: str
    builds: tuple[tuple[Tile, Build], ...]
    rows: int
    multiprocessors: int

    def shape(self, tiling: Tiling, sharing: int = 1, **numbers: int) -> Shape | None:
        """Persistent blocks, as many as there may be tiles, with ``sharing`` blocks for each, and
        multiprocessors. None where there is no build for the tile.
        """
        build = dict(self.builds).get(tiling.tile)
        if build is None:
            return None
        blocks = min(tiling.most * ceil_div(self.rows, build.rows) * sharing, self.multiprocessors)
        return build.shape(self.function, blocks, **numbers)
