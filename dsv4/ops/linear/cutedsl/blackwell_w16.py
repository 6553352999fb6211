"""Blackwell GEMM with packed weights and bfloat16 activations: y = x · Wᵀ, block-diagonal, or over
sorted experts. tcgen05 multiplies weights that a warpgroup has decoded to tensor memory.

Output features are the M of the MMA (128 lanes of tensor memory), tokens its N. One warp fills a
ring of shared memory stages, each 64 columns deep, by TMA: tokens (swizzled for the MMA; those of
an expert gathered by their numbers), weight bytes and block scales as they are stored. Two groups
of four warps take turns: they decode a stage to bfloat16 and store it to tensor memory by
``tcgen05.st.16x128b``, whose registers are those of ``PackedWeight``'s fragments. A thread of one
warp multiplies. Four warps read the sums, one feature per thread, and write the results.

A work tile has one or two sides of 128 features, which share its tokens: 256 consecutive features,
or the same 128 of w1 and w3, whose SwiGLU is taken in registers.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_tensor
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from cutlass.tensor_utils import LayoutEnum

from dsv4.ops.linear.cutedsl import blackwell_instructions as instructions
from dsv4.ops.linear.cutedsl import dequantize
from dsv4.ops.linear.cutedsl.fake_tensors import byte_tensor
from dsv4.ops.linear.cutedsl.gemm_config import (
    CHUNKS,
    SCALE_WORDS,
    SIDE_ROWS,
    SORTED_TILE,
    TENSOR_COLUMNS,
    TILE_K,
    TILE_ROWS,
    W16Config,
    budget,
)
from dsv4.weights.quant import QuantFormat

_STEPS = TILE_K // 16
_SIDE_TILES = SIDE_ROWS // TILE_ROWS
# 32-bit columns of tensor memory that a side's k tile takes.
_FRAGMENT_COLUMNS = TILE_K // 2
# Warps by number: results, products, copies, two groups that decode, and two that gather.
_RESULT_WARPS = 4
_MULTIPLY_WARP = 4
_COPY_WARP = 5
_FIRST_DECODE_WARP = 6
_DECODE_GROUPS = 2
_FIRST_GATHER_WARP = 14
# Rows that one gathering instruction loads, and such instructions of one warp.
_GATHERED = 4
_WARP_GATHERS = 16
# Columns of an accumulator that a thread reads at once.
_PART = 16
# Token tiles that neighbouring blocks take with the same features.
_BAND = 8
# The most words that a box of a tensor map has along a dimension.
_BOX_WORDS = 256
_LOG2_E = 1.4426950408889634


class BlackwellW16:
    """The kernel of one ``W16Config``; call through ``jit``."""

    def __init__(self, config: W16Config):
        self.config = config
        self.format = config.format
        self.sides = config.sides
        self.tile_n = config.tile_tokens
        self.chunks = CHUNKS[config.format]
        self.scale_words = SCALE_WORDS.get(config.format, 0)
        self.budget = budget(config)
        self.stages = self.budget.stages
        self.fragments = self.budget.fragments
        self.accumulators = self.budget.accumulators
        # 32-bit words of a side's weights and scales in a stage.
        self.side_words = _SIDE_TILES * 128 * self.chunks
        self.side_scales = _SIDE_TILES * self.scale_words
        self.box_words = min(128 * self.chunks, _BOX_WORDS)
        self.boxes = 128 * self.chunks // self.box_words
        # What the loading warp's copies bring, besides tokens.
        self.weight_bytes = 4 * self.sides * (self.side_words + self.side_scales)

    def signature(self) -> tuple:
        """Tensors without memory for the arguments of a call, whose sizes are free."""
        weight = self._matrix_signature()
        y = make_fake_tensor(
            cutlass.BFloat16 if self.config.out_dtype == torch.bfloat16 else Float32,
            (cute.sym_int32(), cute.sym_int32(), cute.sym_int32()),
            (cute.sym_int64(), cute.sym_int64(), 1),
            assumed_align=self.config.out_dtype.itemsize,
        )
        x = make_fake_tensor(
            BFloat16,
            (cute.sym_int32(), cute.sym_int32(), cute.sym_int32()),
            (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )
        other = self._matrix_signature() if self.config.gated else weight
        # What a kernel does not read is given as its weight.
        lists = [weight[0]] * 4
        if self.config.sorted:
            lists[0] = make_fake_tensor(Int32, (cute.sym_int32(), 4), (4, 1), assumed_align=16)
            lists[1] = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
            lists[2] = make_fake_tensor(Int32, (cute.sym_int32(),), (1,), assumed_align=4)
        if self.config.gathers:
            lists[3] = make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=4)
        return (x, *weight, *other, *lists, y, Float32(0.0), Int32(1))

    def _matrix_signature(self) -> tuple:
        """Data, block scales and global scales."""
        data = byte_tensor(4)
        block_scale = data
        global_scale = data
        if self.format is QuantFormat.FP8_BLOCK128:
            sizes = [cute.sym_int32() for _ in range(3)]
            strides = (cute.sym_int64(), sizes[2], 1)
            block_scale = make_fake_tensor(Float32, tuple(sizes), strides, assumed_align=4)
        elif self.scale_words:
            block_scale = byte_tensor(4)
        if self.format is QuantFormat.NVFP4:
            global_scale = make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=4)
        return data, block_scale, global_scale

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        block_scale: cute.Tensor,
        global_scale: cute.Tensor,
        up_weight: cute.Tensor,
        up_block_scale: cute.Tensor,
        up_global_scale: cute.Tensor,
        tiles: cute.Tensor,
        tile_count: cute.Tensor,
        slots: cute.Tensor,
        routing: cute.Tensor,
        y: cute.Tensor,
        limit: Float32,
        per_token: Int32,
        stream: CUstream,
    ):
        """x bf16 ``[T, G, K]``, weight uint8 ``[B, R/16, K/CK, 512]``, y ``[rows, G, R]``.

        Block scales: NVFP4 and MXFP4 uint8 ``[B, R/16, K/64, 64 or 32]``, FP8 float32 ``[B or 1,
        rows/128, K/128]``; global scales float32 ``[B]``. B: groups, or experts. The up matrix,
        ``limit``, ``per_token`` and routing weights belong to gated kernels; tiles and slots to
        sorted ones (``dsv4.ops.moe.sorted_pairs.Sorted``). Other kernels and formats ignore them.
        """
        mma = blackwell.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            tcgen05.CtaGroup.ONE,
            (SIDE_ROWS, self.tile_n),
            tcgen05.OperandSource.TMEM,
        )
        x_layout = blackwell.make_smem_layout_b(
            mma, (SIDE_ROWS, self.tile_n, TILE_K), BFloat16, self.stages
        )
        k_tiles = cute.ceil_div(x.shape[2], TILE_K)
        row_tiles = weight.shape[1]
        words = 128 * self.chunks
        weights = [self.box_map(data, words, k_tiles) for data in (weight, up_weight)]
        scales = weights
        if const_expr(self.scale_words > 0):
            both = (block_scale, up_block_scale)
            scales = [self.box_map(scale, self.scale_words, k_tiles) for scale in both]

        @cute.struct
        class Storage:
            filled: cute.struct.MemRange[Int64, self.stages]
            emptied: cute.struct.MemRange[Int64, self.stages]
            decoded: cute.struct.MemRange[Int64, self.fragments]
            consumed: cute.struct.MemRange[Int64, self.fragments]
            summed: cute.struct.MemRange[Int64, self.accumulators]
            read: cute.struct.MemRange[Int64, self.accumulators]
            tensor_memory: Int32
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout.outer)], 1024]
            weight: cute.struct.Align[
                cute.struct.MemRange[Int32, self.stages * self.sides * self.side_words], 128
            ]
            scale: cute.struct.Align[
                cute.struct.MemRange[Int32, max(self.stages * self.sides * self.side_scales, 4)],
                128,
            ]

        self.storage = Storage
        groups = x.shape[1]
        sides = 1 if self.config.gated else self.sides
        tiles_m = cute.ceil_div(row_tiles, _SIDE_TILES * sides)
        if const_expr(self.config.sorted):
            tiles_n = tiles.shape[0] * (SORTED_TILE // self.tile_n)
        else:
            tiles_n = cute.ceil_div(x.shape[0], self.tile_n)
        most = tiles_m * tiles_n * groups
        self.kernel(
            mma,
            x_layout,
            self.token_map(x),
            weights,
            scales,
            (block_scale, up_block_scale),
            (global_scale, up_global_scale),
            (tiles, tile_count, slots, routing),
            y,
            (limit, per_token),
            (tiles_m, tiles_n, groups, k_tiles, row_tiles, x.shape[0]),
        ).launch(
            grid=(min(most, self.config.multiprocessors), 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    @cute.jit
    def token_map(self, x):
        """The atom whose tensor map loads tokens: four gathered rows, or boxes of (columns, tokens,
        groups).
        """
        box = (self.tile_n, TILE_K)
        layout = blackwell.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, box, 1)
        layout = cute.slice_(layout, (None, None, 0))
        if const_expr(self.config.gathers):
            rows = cute.make_layout((x.shape[0], x.shape[2]), stride=(x.stride[0], 1))
            # Only the layout of the numbers is looked at: they differ by row.
            numbers = cute.make_layout(box, stride=(1, 0))
            atom, _ = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensor2DGather4G2SOp(),
                cute.make_tensor(x.iterator, rows),
                layout,
                box,
                gmem_coord_tensor=cute.make_tensor(
                    cute.recast_ptr(x.iterator, dtype=Int32), numbers
                ),
            )
        else:
            tokens = cute.make_layout(
                (x.shape[0], x.shape[2], x.shape[1]), stride=(x.stride[0], 1, x.stride[1])
            )
            atom, _ = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(x.iterator, tokens), layout, box
            )
        return atom

    @cute.jit
    def box_map(self, matrices, words: cutlass.Constexpr[int], k_tiles):
        """The atom whose tensor map loads a side's k tile, ``words`` of each row tile: boxes of
        (words along K, row tiles, matrices).
        """
        row = Int64(words * k_tiles)
        tensor = cute.make_tensor(
            cute.recast_ptr(matrices.iterator, dtype=Int32),
            cute.make_layout(
                (words * k_tiles, matrices.shape[1], matrices.shape[0]),
                stride=(1, row, row * matrices.shape[1]),
            ),
        )
        box = (min(words, _BOX_WORDS), _SIDE_TILES, 1)
        layout = cute.make_ordered_layout(box, order=(0, 1, 2))
        atom, _ = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box
        )
        return atom

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        x_layout: cute.ComposedLayout,
        token_map,
        weight_maps,
        scale_maps,
        block_scales,
        global_scales,
        lists,
        y,
        scalars,
        counts,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        if warp == _COPY_WARP:
            with cute.arch.elect_one():
                self.init_barriers(storage)
            cute.arch.mbarrier_init_fence()
        if warp == 0:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, storage.tensor_memory)
            cute.arch.relinquish_tmem_alloc_permit()
            instructions.fence_before_sync()
        cute.arch.sync_threads()
        instructions.fence_after_sync()
        base = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_memory)
        # Tokens, lists and the memory of the results belong to the kernels before this one.
        cute.arch.griddepcontrol_wait()
        total = counts[0] * counts[1] * counts[2]
        if const_expr(self.config.sorted):
            total = lists[1][0] * (SORTED_TILE // self.tile_n) * counts[0]
        work = (lists[0], counts, total)
        if warp == _COPY_WARP:
            self.copy(storage, x_layout, token_map, weight_maps, scale_maps, work)
        if const_expr(self.config.gathers):  # noqa: SIM102
            if warp >= _FIRST_GATHER_WARP:
                self.gather(storage, x_layout, token_map, lists[2], scalars[1], warp, work)
        if warp >= _FIRST_DECODE_WARP and warp < _FIRST_GATHER_WARP:
            self.decode(storage, base, block_scales, warp, thread % 32, work)
        if warp == _MULTIPLY_WARP:
            self.multiply(storage, mma, x_layout, base, work)
        if warp < _RESULT_WARPS:
            self.write(storage, mma, base, global_scales, lists, y, scalars, thread, work)
            # The products that wrote this tensor memory have been waited for by all four warps.
            instructions.fence_before_sync()
            cute.arch.barrier(barrier_id=1, number_of_threads=32 * _RESULT_WARPS)
            if warp == 0:
                instructions.fence_after_sync()
                cute.arch.dealloc_tmem(base, TENSOR_COLUMNS)

    @cute.jit
    def init_barriers(self, storage):
        """Arrivals of every barrier: one with the bytes of a stage and one of each gathering warp,
        four decoding warps and the product that release it; 128 threads for decoded fragments and
        read sums.
        """
        for barriers, count, arrivals in (
            (storage.filled, self.stages, 3 if self.config.gathers else 1),
            (storage.emptied, self.stages, 5),
            (storage.decoded, self.fragments, 128),
            (storage.consumed, self.fragments, 1),
            (storage.summed, self.accumulators, 1),
            (storage.read, self.accumulators, 128),
        ):
            for i in range_constexpr(count):
                cute.arch.mbarrier_init(barriers.data_ptr() + i, arrivals)

    @cute.jit
    def tile_at(self, work, index: Int32):
        """(matrix, feature tile, first token, tokens) of a work tile; no tokens: nothing to do."""
        tiles, counts, _ = work
        tiles_m, tiles_n, _, _, _, tokens = counts
        matrix = Int32(0)
        m = Int32(0)
        first = Int32(0)
        count = Int32(0)
        if const_expr(self.config.sorted):
            parts = SORTED_TILE // self.tile_n
            m = index % tiles_m
            part = index // tiles_m % parts
            tile = index // (tiles_m * parts)
            matrix = tiles[tile, 0]
            first = tiles[tile, 1] + part * self.tile_n
            count = tiles[tile, 2] - part * self.tile_n
        else:
            matrix = index // (tiles_m * tiles_n)
            inside = index % (tiles_m * tiles_n)
            band = inside // (_BAND * tiles_m)
            width = cutlass.min(tiles_n - band * _BAND, _BAND)
            inside = inside - band * _BAND * tiles_m
            m = inside // width
            first = (band * _BAND + inside % width) * self.tile_n
            count = tokens - first
        return matrix, m, first, cutlass.min(count, self.tile_n)

    @cute.jit
    def first_row_tile(self, m: Int32, side: cutlass.Constexpr[int]):
        """Of a side of feature tile ``m``."""
        if const_expr(self.config.gated):
            return m * _SIDE_TILES
        return (m * self.sides + side) * _SIDE_TILES

    # ------------------------------------------------------------------ copies

    @cute.jit
    def copy(self, storage, x_layout, token_map, weight_maps, scale_maps, work):
        """The loading warp: weights, block scales and boxes of tokens of all k tiles of this
        block's work tiles.
        """
        _, counts, total = work
        k_tiles = counts[3]
        x_map = instructions.map_address(token_map)
        maps = [instructions.map_address(atom) for atom in weight_maps]
        factor_maps = [instructions.map_address(atom) for atom in scale_maps]
        x_stage = cute.size(x_layout.outer) // self.stages
        state = make_pipeline_state(PipelineUserType.Producer, self.stages)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        while index < total:
            matrix, m, first, count = self.tile_at(work, index)
            rows = Int32(self.tile_n)
            if const_expr(self.config.gathers):
                rows = cute.round_up(count, _GATHERED)
            if count > 0:
                for k in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(storage.emptied.data_ptr() + state.index, state.phase)
                    barrier = storage.filled.data_ptr() + state.index
                    with cute.arch.elect_one():
                        expected = self.weight_bytes + rows * (2 * TILE_K)
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
                        for side in range_constexpr(self.sides):
                            which = side if const_expr(self.config.gated) else 0
                            row_tile = self.first_row_tile(m, side)
                            place = state.index * self.sides + side
                            for box in range_constexpr(self.boxes):
                                column = (k * self.boxes + box) * self.box_words
                                box_place = place * self.boxes + box
                                instructions.load_box(
                                    maps[which],
                                    storage.weight.data_ptr()
                                    + box_place * (_SIDE_TILES * self.box_words),
                                    barrier,
                                    (column, row_tile, matrix),
                                )
                            if const_expr(self.scale_words > 0):
                                instructions.load_box(
                                    factor_maps[which],
                                    storage.scale.data_ptr() + place * self.side_scales,
                                    barrier,
                                    (k * self.scale_words, row_tile, matrix),
                                )
                        if const_expr(not self.config.gathers):
                            group = Int32(0) if const_expr(self.config.sorted) else matrix
                            to = storage.x.data_ptr() + state.index * x_stage
                            instructions.load_box(x_map, to, barrier, (k * TILE_K, first, group))
                    state.advance()
            index += blocks
        cute.arch.griddepcontrol_launch_dependents()
        # Barriers must outlive the arrivals of the last products.
        for _ in range_constexpr(self.stages):
            cute.arch.mbarrier_wait(storage.emptied.data_ptr() + state.index, state.phase)
            state.advance()

    @cute.jit
    def gather(self, storage, x_layout, token_map, slots, per_token, warp, work):
        """A gathering warp: up to 64 of the tokens of every k tile, four by each of 16 lanes. Rows
        behind the last token keep what they held: nobody reads their products.
        """
        _, counts, total = work
        k_tiles = counts[3]
        tokens = counts[5]
        x_map = instructions.map_address(token_map)
        x_stage = cute.size(x_layout.outer) // self.stages
        lane = cute.arch.lane_idx()
        begin = ((warp - _FIRST_GATHER_WARP) * _WARP_GATHERS + lane) * _GATHERED
        state = make_pipeline_state(PipelineUserType.Producer, self.stages)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        while index < total:
            _, _, first, count = self.tile_at(work, index)
            numbers = [tokens, tokens, tokens, tokens]
            for i in range_constexpr(_GATHERED):
                # Beyond the tile a row outside of x, which reads as zeros.
                number = tokens
                if begin + i < count:
                    number = slots[first + begin + i] // per_token
                numbers[i] = number
            if count > 0:
                for k in cutlass.range(k_tiles, unroll=1):
                    # Lanes without tokens must not fall behind: a wait tells two phases apart.
                    cute.arch.sync_warp()
                    cute.arch.mbarrier_wait(storage.emptied.data_ptr() + state.index, state.phase)
                    barrier = storage.filled.data_ptr() + state.index
                    if lane < _WARP_GATHERS and begin < count:
                        to = storage.x.data_ptr() + (state.index * x_stage + begin * TILE_K)
                        instructions.load_rows(x_map, to, barrier, k * TILE_K, tuple(numbers))
                    # Nor may a warp without tokens, for which the stage waits, too.
                    if lane == 0:
                        cute.arch.mbarrier_arrive(barrier)
                    state.advance()
            index += blocks

    # ------------------------------------------------------------------ decoding

    @cute.jit
    def decode(self, storage, base, block_scales, warp, lane, work):
        """A decoding warp: of every second k tile, row tiles 2q and 2q + 1 of each side, which are
        lanes 32q … 32q + 31 of tensor memory.
        """
        _, counts, total = work
        k_tiles = counts[3]
        quarter = warp % 4
        turn = (warp - _FIRST_DECODE_WARP) // 4
        source = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        target = make_pipeline_state(PipelineUserType.Producer, self.fragments)
        address = Int32(base.toint()) + (quarter << 21)
        address += self.accumulators * self.sides * self.tile_n
        number = Int32(0)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        while index < total:
            matrix, m, _, count = self.tile_at(work, index)
            if count > 0:
                for k in cutlass.range(k_tiles, unroll=1):
                    if number % _DECODE_GROUPS == turn:
                        # Read before the waits, which hide their latency.
                        factors = [
                            self.block_factor(
                                block_scales[side if const_expr(self.config.gated) else 0],
                                counts,
                                matrix,
                                self.first_row_tile(m, side) + 2 * quarter + half,
                                k,
                            )
                            for side in range(self.sides)
                            for half in range(2)
                        ]
                        cute.arch.mbarrier_wait(
                            storage.filled.data_ptr() + source.index, source.phase
                        )
                        cute.arch.mbarrier_wait(
                            storage.consumed.data_ptr() + target.index, target.phase
                        )
                        instructions.fence_after_sync()
                        for side in range_constexpr(self.sides):
                            for half in range_constexpr(2):
                                row_tile = 2 * quarter + half
                                factor = factors[2 * side + half]
                                place = source.index * self.sides + side
                                registers = self.decode_tile(storage, place, row_tile, lane, factor)
                                column = (target.index * self.sides + side) * _FRAGMENT_COLUMNS
                                instructions.store_fragments(
                                    address + (half << 20) + column, registers
                                )
                        cute.arch.sync_warp()
                        if lane == 0:
                            cute.arch.mbarrier_arrive(storage.emptied.data_ptr() + source.index)
                        cute.arch.fence_view_async_tmem_store()
                        instructions.fence_before_sync()
                        cute.arch.mbarrier_arrive(storage.decoded.data_ptr() + target.index)
                    number += 1
                    source.advance()
                    target.advance()
            index += blocks
        for _ in range_constexpr(self.fragments):
            cute.arch.mbarrier_wait(storage.consumed.data_ptr() + target.index, target.phase)
            target.advance()

    @cute.jit
    def block_factor(self, block_scale, counts, matrix, row_tile, k):
        """FP8: the block scale, a power of two, twice as bf16; other formats have none."""
        factor = Uint32(0)
        if const_expr(self.format is QuantFormat.FP8_BLOCK128):
            if const_expr(not self.config.sorted):
                # Groups share the blocks of one matrix.
                row_tile = row_tile + matrix * counts[4]
                matrix = Int32(0)
            row = cutlass.min(row_tile // 8, block_scale.shape[1] - 1)
            scale = cute.make_rmem_tensor(1, Float32)
            scale[0] = block_scale[matrix, row, k // 2]
            bits = cute.recast_tensor(scale, Uint32)[0]
            factor = (bits & 0xFFFF0000) | (bits >> 16)
        return factor

    @cute.jit
    def decode_tile(self, storage, place, row_tile, lane, factor):
        """The sixteen registers of a row tile's 64 columns, as bf16x2."""
        words = self.box_words
        source = cute.make_tensor(
            cute.recast_ptr(storage.weight.data_ptr(), dtype=Uint32)
            + (place * self.side_words + row_tile * words + lane * 4),
            cute.make_layout(
                (4, (words // 128, self.boxes)), stride=(1, (128, _SIDE_TILES * words))
            ),
        )
        source = cute.make_tensor(source.iterator.align(16), source.layout)
        raw = cute.make_rmem_tensor((4, self.chunks), Uint32)
        cute.autovec_copy(source, raw)
        registers = []
        if const_expr(self.format is QuantFormat.BF16):
            for step in range_constexpr(_STEPS):
                registers += [raw[word, step] for word in range(4)]
        elif const_expr(self.format is QuantFormat.FP8_BLOCK128):
            for step in range_constexpr(_STEPS):
                pair = 2 * (step % 2)
                values = dequantize.dequantize_fp8(raw[pair, step // 2], raw[pair + 1, step // 2])
                registers += [dequantize.mul_bf16x2(value, factor) for value in values]
        else:
            count = self.scale_words // 8
            scales = cute.make_rmem_tensor(count, Uint32)
            pointer = cute.recast_ptr(storage.scale.data_ptr(), dtype=Uint32) + (
                place * self.side_scales + row_tile * self.scale_words + lane // 4 * count
            )
            cute.autovec_copy(
                cute.make_tensor(pointer.align(4 * count), cute.make_layout(count)), scales
            )
            for step in range_constexpr(_STEPS):
                if const_expr(self.format is QuantFormat.NVFP4):
                    pair = scales[step // 2] >> (16 * (step % 2))
                    registers += list(dequantize.dequantize_nvfp4(raw[step, 0], pair))
                else:
                    pair = scales[0] >> (16 * (step // 2))
                    registers += list(dequantize.dequantize_mxfp4(raw[step, 0], pair))
        return registers

    # ------------------------------------------------------------------ products

    @cute.jit
    def multiply(self, storage, mma, x_layout, base, work):
        """The warp one of whose threads multiplies."""
        _, counts, total = work
        k_tiles = counts[3]
        tokens = mma.make_fragment_B(storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner))
        sums = self.accumulator(mma, base)
        weights = self.fragment(mma, base)
        source = make_pipeline_state(PipelineUserType.Consumer, self.stages)
        fragment = make_pipeline_state(PipelineUserType.Consumer, self.fragments)
        target = make_pipeline_state(PipelineUserType.Producer, self.accumulators)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        while index < total:
            _, _, _, count = self.tile_at(work, index)
            if count > 0:
                cute.arch.mbarrier_wait(storage.read.data_ptr() + target.index, target.phase)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(storage.filled.data_ptr() + source.index, source.phase)
                    cute.arch.mbarrier_wait(
                        storage.decoded.data_ptr() + fragment.index, fragment.phase
                    )
                    instructions.fence_after_sync()
                    for step in range_constexpr(_STEPS):
                        for side in range_constexpr(self.sides):
                            own = sums[None, None, None, target.index * self.sides + side]
                            place = fragment.index * self.sides + side
                            cute.gemm(
                                mma,
                                own,
                                weights[None, None, step, place],
                                tokens[None, None, step, source.index],
                                own,
                            )
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        tcgen05.commit(storage.emptied.data_ptr() + source.index)
                        tcgen05.commit(storage.consumed.data_ptr() + fragment.index)
                    source.advance()
                    fragment.advance()
                with cute.arch.elect_one():
                    tcgen05.commit(storage.summed.data_ptr() + target.index)
                target.advance()
            index += blocks

    def accumulator(self, mma, base):
        """All accumulators, in pairs of sides, from the first column on."""
        shape = mma.partition_shape_C((SIDE_ROWS, self.tile_n))
        layout = mma.make_fragment_C(cute.append(shape, self.accumulators * self.sides)).layout
        return cute.make_tensor(base, layout)

    def fragment(self, mma, base):
        """All decoded k tiles, in pairs of sides, behind the accumulators."""
        shape = mma.partition_shape_A((SIDE_ROWS, TILE_K))
        layout = mma.make_fragment_A(cute.append(shape, self.fragments * self.sides)).layout
        first = base + self.accumulators * self.sides * self.tile_n
        return cute.make_tensor(cute.recast_ptr(first, dtype=BFloat16), layout)

    # ------------------------------------------------------------------ results

    @cute.jit
    def write(self, storage, mma, base, global_scales, lists, y, scalars, thread, work):
        """The four warps of results. Neighbouring threads have neighbouring features, so that their
        stores coalesce.
        """
        _, counts, total = work
        lane = thread % 32
        _, _, slots, routing = lists
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(_PART)), Float32)
        sums = self.accumulator(mma, base)[(None, None), 0, 0, None]
        parts = cute.flat_divide(sums, (SIDE_ROWS, _PART))
        copy = tcgen05.make_tmem_copy(atom, parts[None, None, 0, 0, 0]).get_slice(thread)
        source = copy.partition_S(parts)
        shape = copy.partition_D(cute.make_identity_tensor((SIDE_ROWS, _PART))).shape
        state = make_pipeline_state(PipelineUserType.Consumer, self.accumulators)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        while index < total:
            matrix, m, first, count = self.tile_at(work, index)
            if count > 0:
                factors = [self.global_factor(scale, matrix) for scale in global_scales]
                cute.arch.mbarrier_wait(storage.summed.data_ptr() + state.index, state.phase)
                instructions.fence_after_sync()
                group = Int32(0) if const_expr(self.config.sorted) else matrix
                for j in cutlass.range(cute.ceil_div(count, _PART), unroll=1):
                    begin = j * _PART
                    values = []
                    for side in range_constexpr(self.sides):
                        part = cute.make_rmem_tensor(shape, Float32)
                        place = state.index * self.sides + side
                        cute.copy(copy, source[None, None, None, 0, j, place], part)
                        values.append(part)
                    slot, weight = self.route(slots, routing, first, begin + lane % _PART, count)
                    cute.arch.fence_view_async_tmem_load()
                    for i in range_constexpr(_PART):
                        row = first + begin + i
                        sums_of_i = [dequantize.after_wait(part[i]) for part in values]
                        found = [value * factors[0] for value in sums_of_i]
                        if const_expr(self.config.gated):
                            own = cute.arch.shuffle_sync(weight, i)
                            up = sums_of_i[1] * factors[1]
                            found = [self.gate(found[0], up, own, scalars[0])]
                        elif const_expr(self.config.sorted):
                            row = cute.arch.shuffle_sync(slot, i)
                        for side in range_constexpr(len(found)):
                            feature = self.first_row_tile(m, side) * TILE_ROWS + thread
                            if begin + i < count and feature < y.shape[2]:
                                y[row, group, feature] = found[side].to(y.element_type)
                instructions.fence_before_sync()
                cute.arch.mbarrier_arrive(storage.read.data_ptr() + state.index)
                state.advance()
            index += blocks

    @cute.jit
    def global_factor(self, global_scale, matrix):
        """What sums are multiplied by: NVFP4's global scale and the 2^8 that decoding left out."""
        factor = Float32(1.0)
        if const_expr(self.format is QuantFormat.NVFP4):
            group = matrix if const_expr(self.config.sorted) else 0
            factor = global_scale[group] * 256.0
        return factor

    @cute.jit
    def route(self, slots, routing, first, token, count):
        """(slot, routing weight) of a token of a sorted work tile; (0, 1) beyond and for others."""
        row = Int32(0)
        weight = Float32(1.0)
        if const_expr(self.config.sorted):  # noqa: SIM102
            if token < count:
                row = slots[first + token]
                if const_expr(self.config.gated):
                    weight = routing[row]
        return row, weight

    @cute.jit
    def gate(self, gate, up, weight, limit):
        """silu(min(gate, limit)) · clamp(up, ±limit) · weight, in the order of the portable
        kernel.
        """
        # Comparisons, not minima: a NaN must stay one.
        if gate > limit:
            gate = limit
        if up > limit:
            up = limit
        if up < -limit:
            up = -limit
        silu = instructions.divide(gate, 1.0 + cute.math.exp2(gate * -_LOG2_E, fastmath=True))
        return silu * up * weight
