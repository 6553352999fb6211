"""Blackwell product of quantised activations and native weights: dense, block-diagonal, grouped
over experts, or gate and up with SwiGLU.

Tokens are the M of the MMA, 128 a CTA, so that a thread of the epilogue owns the row of a token;
features are its N. A CTA, or a pair of them for 256 tokens, is persistent. Warp 5 fills a ring of
shared memory stages by TMA: codes of tokens and weights, swizzled, 128 bytes of every row, and
their block scales. Warp 4 copies the scales to tensor memory and issues four block-scaled MMAs per
stage. Warps 0 to 3 turn sums into results. 4-bit weights that meet 8-bit activations are spread by
TMA to one code a byte.

Rounding points, all float32 unless said otherwise:

* A result is sum · (global scale of the row · that of the weight), rounded to its dtype. Without
  row scales (FP8 activations) it is sum · global scale of the weight.
* A hidden value is bf16((g / (1 + 2^(g · -log2 e))) · u · weight), with g = min(gate, limit), u =
  clamp(up, ±limit) and gate, up as a result above, rounded after every operation. NaN stays NaN.
* Hidden rows are quantised from these bfloat16 values as ``dsv4.ops.quantize_activations`` does:
  FP8 with a power-of-two scale per 128 columns (a tile has 128), NVFP4 with the fixed global scale
  that the launch is given.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from dsv4.integers import round_up
from dsv4.ops.linear.cutedsl import scaled_codes as codes
from dsv4.ops.linear.cutedsl.fake_tensors import byte_tensor
from dsv4.ops.linear.cutedsl.gemm_config import TENSOR_COLUMNS
from dsv4.ops.linear.cutedsl.scaled_config import (
    CTA_TOKENS,
    MMAS,
    WARPS,
    ScaledConfig,
    scaled_budget,
)
from dsv4.weights.native import NATIVE_GROUP
from dsv4.weights.quant import QuantFormat

_K_MAJOR = OperandMajorMode.K
# Codes of activations and weights, and their scales, by the format of the weight.
_TYPES = {
    QuantFormat.NVFP4: (cutlass.Float4E2M1FN, cutlass.Float4E2M1FN, cutlass.Float8E4M3FN),
    QuantFormat.MXFP4: (cutlass.Float8E4M3FN, cutlass.Float4E2M1FN, cutlass.Float8E8M0FNU),
    QuantFormat.FP8_BLOCK128: (cutlass.Float8E4M3FN, cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU),
}
OUT_TYPES = {torch.bfloat16: BFloat16, torch.float32: Float32}
# Columns that the epilogue reads from tensor memory at once.
_CHUNK = 32
_HIDDEN_COLUMNS = 128
_LOG2_E = 1.4426950408889634
# Named barriers of the epilogue's warps and of those that use tensor memory.
_EPILOGUE_BARRIER = 1
_TENSOR_BARRIER = 2
_MMA_WARP = 4
_LOAD_WARP = 5


class Tensors(NamedTuple):
    """One of everything that is loaded by TMA: atoms, tensors or buffers."""

    rows: object
    row_scale: object
    weight: object
    weight_scale: object


class Work(NamedTuple):
    """The line of work tiles: this cluster takes ``first`` and every ``step``-th of ``total``."""

    first: Int32
    step: Int32
    total: Int32
    tiles_n: Int32
    k_tiles: Int32
    group_tiles: Int32


class ScaledGemm:
    """The kernel of one ``ScaledConfig``; call through ``jit``."""

    def __init__(self, config: ScaledConfig):
        self.config = config
        self.row_type, self.weight_type, self.scale_type = _TYPES[config.format]
        self.group = NATIVE_GROUP[config.format]
        # Rows are padded to whole scale atoms.
        self.row_multiple = 4 * self.group
        # 4-bit codes that meet 8-bit ones lie in 8-bit containers.
        same = self.row_type.width == self.weight_type.width
        self.weight_smem_type = self.weight_type if same else cutlass.Uint8
        self.cta_group = tcgen05.CtaGroup.TWO if config.pair else tcgen05.CtaGroup.ONE
        self.tiler = (config.tile_tokens, config.tile_features, config.tile_k)
        # Both CTAs of a pair need the scales of all features, in whole blocks of 128.
        self.scale_tiler = (CTA_TOKENS, round_up(config.tile_features, 128), config.tile_k)
        budget = scaled_budget(config)
        self.stages = budget.stages
        self.accumulators = budget.accumulators

    def signature(self):
        """Fake tensors and numbers for all arguments but the stream."""
        config = self.config
        pairs = _vector(Int32) if config.sorted else None
        row_global = _vector(Float32) if config.format is QuantFormat.NVFP4 else None
        tiles = None
        tile_count = None
        if config.sorted:
            tiles = make_fake_compact_tensor(
                Int32, (cute.sym_int32(), 4), stride_order=(1, 0), assumed_align=16
            )
            tile_count = make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
        results = (_rows(2), _rows(1), _vector(Float32) if row_global is not None else None)
        if not config.gated:
            shape = (cute.sym_int32(), cute.sym_int32(divisibility=8))
            strides = (cute.sym_int64(divisibility=8), 1)
            y = make_fake_tensor(OUT_TYPES[config.out_dtype], shape, strides, assumed_align=16)
            results = (y, None, None)
        return (
            _rows(2),
            _rows(1),
            row_global,
            _rows(3),
            _rows(2),
            _vector(Float32),
            tiles,
            tile_count,
            pairs,
            _vector(Float32) if config.sorted and config.gated else None,
            *results,
            Float32(0.0),
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        rows: cute.Tensor,
        row_scale: cute.Tensor,
        row_global: cute.Tensor | None,
        weight: cute.Tensor,
        weight_scale: cute.Tensor,
        weight_global: cute.Tensor,
        tiles: cute.Tensor | None,
        tile_count: cute.Tensor | None,
        slots: cute.Tensor | None,
        routing: cute.Tensor | None,
        y: cute.Tensor,
        y_scale: cute.Tensor | None,
        y_global: cute.Tensor | None,
        limit: Float32,
        hidden_global: Float32,
        stream: CUstream,
    ):
        """Quantised rows uint8 ``[T, K']`` or ``[T, K'/2]`` and their scales in the 128 x 4 order,
        ``row_global`` float32 ``[T]`` (NVFP4); a native weight with a leading dimension of
        experts, 1 for a dense product, its global scales flat.

        Dense: T rows, y ``[T, N]``; K' = G · K multiplies block-diagonally. Sorted: tile i of
        ``tiles`` int32 ``[most, 4]`` {expert, first position, rows, 0}, ``tile_count`` int32
        ``[1]`` in use, owns rows from i · tile_tokens on; position p is pair ``slots[p]``, whose
        row of y it becomes. Gate and up: y, ``y_scale``, ``y_global`` are quantised rows of F
        columns; sorted, a row is weighted by ``routing[slots[p]]``.
        """
        config = self.config
        features = weight.shape[1]
        columns = weight.shape[2] * (8 // self.weight_type.width)
        row_columns = rows.shape[1] * (8 // self.row_type.width)
        mma = self.tiled_mma(self.cta_group, self.tiler)
        scale_mma = self.tiled_mma(tcgen05.CtaGroup.ONE, self.scale_tiler)
        ctas = cute.make_layout((config.ctas, 1, 1))
        cluster = cute.tiled_divide(ctas, (mma.thr_id.shape,))
        scale_cluster = cute.tiled_divide(ctas, (scale_mma.thr_id.shape,))

        layouts = Tensors(
            sm100.make_smem_layout_a(mma, self.tiler, self.row_type, self.stages),
            blockscaled.make_smem_layout_sfa(mma, self.tiler, self.group, self.stages),
            sm100.make_smem_layout_b(mma, self.tiler, self.weight_smem_type, self.stages),
            blockscaled.make_smem_layout_sfb(mma, self.tiler, self.group, self.stages),
        )
        row_layout = cute.make_ordered_layout(
            (rows.shape[0], cute.assume(row_columns, 32), 1), order=(1, 0, 2)
        )
        weight_layout = cute.make_layout(
            (features, cute.assume(columns, 32), weight.shape[0]),
            stride=(columns, 1, Int64(features) * columns),
        )
        sources = Tensors(
            _typed(rows, self.row_type, row_layout),
            _typed(row_scale, self.scale_type, self.scale_layout(row_layout)),
            _typed(weight, self.weight_type, weight_layout),
            _typed(weight_scale, self.scale_type, self.scale_layout(weight_layout)),
        )
        atoms, tensors = self.tma(sources, layouts, (mma, cluster), (scale_mma, scale_cluster))
        one = (None, None, None, 0)
        types = (self.row_type, self.scale_type, self.weight_smem_type, self.scale_type)
        stage_bytes = 0
        for dtype, layout in zip(types, layouts, strict=True):
            stage_bytes += cute.size_in_bytes(dtype, cute.slice_(layout, one))
        self.arriving_bytes = stage_bytes * config.ctas
        self.storage = self.shared_storage(layouts)

        tiles_m = cute.ceil_div(rows.shape[0], config.tile_tokens)
        if const_expr(config.sorted):
            tiles_m = tiles.shape[0]
        tiles_n = cute.ceil_div(features, config.tile_features)
        groups = row_columns // cute.round_up(columns, self.row_multiple)
        clusters = min(tiles_m * tiles_n, config.multiprocessors // config.ctas)
        self.kernel(
            mma,
            scale_mma,
            atoms,
            tensors,
            layouts,
            (cluster, scale_cluster),
            (row_global, weight_global, tiles, tile_count, slots, routing),
            (y, y_scale, y_global),
            (limit, hidden_global),
            (
                rows.shape[0],
                features,
                tiles_m,
                tiles_n,
                cute.ceil_div(columns, config.tile_k),
                tiles_n // groups,
            ),
        ).launch(
            grid=(clusters * config.ctas, 1, 1),
            block=(32 * WARPS, 1, 1),
            cluster=(config.ctas, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    def tiled_mma(self, cta_group, tiler):
        """The block-scaled MMA of a tile."""
        return sm100.make_blockscaled_trivial_tiled_mma(
            self.row_type,
            self.weight_type,
            _K_MAJOR,
            _K_MAJOR,
            self.scale_type,
            self.group,
            cta_group,
            tiler[:2],
        )

    def scale_layout(self, layout):
        """Where the scales of codes with this layout lie in memory."""
        return blockscaled.tile_atom_to_shape_SF(layout.shape, self.group)

    def tma(self, sources, layouts, whole, scales):
        """TMA atoms and the tensors that their coordinates are taken from."""
        mma, cluster = whole
        scale_mma, scale_cluster = scales
        ctas = (self.config.ctas, 1)
        load_rows = sm100.cluster_shape_to_tma_atom_A(ctas, mma.thr_id)
        load_weight = sm100.cluster_shape_to_tma_atom_B(ctas, mma.thr_id)
        load_scale = sm100.cluster_shape_to_tma_atom_SFB(ctas, mma.thr_id)
        stage = Tensors(*(cute.slice_(layout, (None, None, None, 0)) for layout in layouts))
        make_a = cute.nvgpu.make_tiled_tma_atom_A
        make_b = cute.nvgpu.make_tiled_tma_atom_B
        spread = None if self.weight_smem_type is self.weight_type else cutlass.Uint8
        made = (
            make_a(load_rows, sources.rows, stage.rows, self.tiler, mma, cluster.shape),
            make_a(
                load_rows,
                sources.row_scale,
                stage.row_scale,
                self.tiler,
                mma,
                cluster.shape,
                internal_type=cutlass.Int16,
            ),
            make_b(
                load_weight,
                sources.weight,
                stage.weight,
                self.tiler,
                mma,
                cluster.shape,
                internal_type=spread,
            ),
            make_b(
                load_scale,
                sources.weight_scale,
                stage.weight_scale,
                self.scale_tiler,
                scale_mma,
                scale_cluster.shape,
                internal_type=cutlass.Int16,
            ),
        )
        return Tensors(*(atom for atom, _ in made)), Tensors(*(tensor for _, tensor in made))

    def shared_storage(self, layouts):
        """The type of the shared memory of a CTA."""

        def stages(dtype, size):
            return cute.struct.Align[cute.struct.MemRange[dtype, size], 1024]

        @cute.struct
        class Storage:
            ring: cute.struct.MemRange[cutlass.Int64, self.stages * 2]
            sums: cute.struct.MemRange[cutlass.Int64, self.accumulators * 2]
            released: cutlass.Int64
            tensor_memory: cutlass.Int32
            rows: stages(self.row_type, cute.cosize(layouts.rows.outer))
            weight: stages(self.weight_smem_type, cute.cosize(layouts.weight.outer))
            row_scale: stages(self.scale_type, cute.cosize(layouts.row_scale))
            weight_scale: stages(self.scale_type, cute.cosize(layouts.weight_scale))

        return Storage

    @cute.kernel
    def kernel(
        self,
        mma,
        scale_mma,
        atoms,
        tensors,
        layouts,
        clusters,
        inputs,
        outputs,
        numbers,
        counts,
    ):
        config = self.config
        atoms = Tensors(*atoms)
        tensors = Tensors(*tensors)
        layouts = Tensors(*layouts)
        cluster, _ = clusters
        rows, features, tiles_m, tiles_n, k_tiles, group_tiles = counts
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        agent = pipeline.Agent.Thread
        ring = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.ring.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(agent),
            consumer_group=pipeline.CooperativeGroup(agent, 1),
            tx_count=self.arriving_bytes,
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        sums = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.sums.data_ptr(),
            num_stages=self.accumulators,
            producer_group=pipeline.CooperativeGroup(agent),
            consumer_group=pipeline.CooperativeGroup(agent, CTA_TOKENS * config.ctas),
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        tensor_memory = cutlass.memory.TmemAllocator(
            storage.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(
                barrier_id=_TENSOR_BARRIER, num_threads=32 * _LOAD_WARP
            ),
            allocator_warp_id=0,
            is_two_cta=config.pair,
            two_cta_tmem_dealloc_mbar_ptr=storage.released.ptr,
        )
        # Before the CTAs meet: the first MMA of a pair writes to the tensor memory of both, and
        # an allocation need not wait for that of the other CTA.
        tensor_memory.allocate(TENSOR_COLUMNS)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.ctas, 1), is_relaxed=False)
        buffers = Tensors(
            storage.rows.get_tensor(layouts.rows.outer, swizzle=layouts.rows.inner),
            storage.row_scale.get_tensor(layouts.row_scale),
            storage.weight.get_tensor(layouts.weight.outer, swizzle=layouts.weight.inner),
            storage.weight_scale.get_tensor(layouts.weight_scale),
        )
        shape = mma.partition_shape_C(self.tiler[:2])
        sum_layout = mma.make_fragment_C(cute.append(shape, self.accumulators)).layout
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.ctas, 1))

        # The rows and the list of tiles come from the kernels before this one.
        cute.arch.griddepcontrol_wait()
        tile_count = inputs[3]
        if const_expr(config.sorted):
            tiles_m = tile_count[0]
        work = Work(
            block // config.ctas,
            blocks // config.ctas,
            tiles_m * tiles_n,
            tiles_n,
            k_tiles,
            group_tiles,
        )
        if warp == _LOAD_WARP:
            self.load(mma, scale_mma, atoms, tensors, buffers, clusters, rank, ring, inputs, work)
        if warp == _MMA_WARP:
            tensor_memory.wait_for_alloc()
            base = tensor_memory.retrieve_ptr(Float32)
            self.multiply(mma, base, sum_layout, buffers, layouts, ring, sums, rank == 0, work)
        if warp < _MMA_WARP:
            tensor_memory.wait_for_alloc()
            base = tensor_memory.retrieve_ptr(Float32)
            self.finish(
                base,
                sum_layout,
                sums,
                inputs,
                outputs,
                numbers,
                (rank, thread, rows, features),
                work,
            )
            tensor_memory.relinquish_alloc_permit()
            cute.arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=CTA_TOKENS)
            tensor_memory.free(base)

    def partition(self, atoms, buffers, sources, shares):
        """Where the copies of a stage go to and come from; ``shares``: which part of a box this CTA
        loads for the others.
        """
        parts = [
            cpasync.tma_partition(
                atom, *share, cute.group_modes(buffer, 0, 3), cute.group_modes(source, 0, 3)
            )
            for atom, buffer, source, share in zip(atoms, buffers, sources, shares, strict=True)
        ]
        to, source = ([cute.filter_zeros(part[side]) for part in parts] for side in range(2))
        return Tensors(*to), Tensors(*source)

    @cute.jit
    def load(self, mma, scale_mma, atoms, tensors, buffers, clusters, rank, ring, inputs, work):
        """The loading warp: all k tiles of this cluster's work tiles, in the order of the MMAs."""
        config = self.config
        cluster, scale_cluster = clusters
        tiles = inputs[2]
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        tokens, features, k = self.tiler
        whole = mma.get_slice(rank % config.ctas)
        scale = scale_mma.get_slice(0)
        every = (None, None, None)
        sources = Tensors(
            whole.partition_A(cute.local_tile(tensors.rows, (tokens, k), every)),
            whole.partition_A(cute.local_tile(tensors.row_scale, (tokens, k), every)),
            whole.partition_B(cute.local_tile(tensors.weight, (features, k), every)),
            scale.partition_B(
                cute.local_tile(tensors.weight_scale, (self.scale_tiler[1], k), every)
            ),
        )
        scale_coordinate = scale_cluster.get_flat_coord(rank)
        sharing = cute.make_layout(cute.slice_(scale_cluster, (0, None, 0, 0)).shape)
        alone = (0, cute.make_layout(1))
        shares = Tensors(alone, alone, alone, (scale_coordinate[1], sharing))
        to, source = self.partition(atoms, buffers, sources, shares)
        row_mask = None
        weight_mask = None
        scale_mask = None
        if const_expr(config.pair):
            coordinate = cluster.get_flat_coord(rank)
            row_mask = cpasync.create_tma_multicast_mask(cluster, coordinate, mcast_mode=2)
            weight_mask = cpasync.create_tma_multicast_mask(cluster, coordinate, mcast_mode=1)
            scale_mask = cpasync.create_tma_multicast_mask(
                scale_cluster, scale_coordinate, mcast_mode=1
            )
        masks = Tensors(row_mask, row_mask, weight_mask, scale_mask)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index = work.first
        while index < work.total:
            m = index // work.tiles_n
            n = index % work.tiles_n
            expert = Int32(0)
            first_k = Int32(0)
            if const_expr(config.sorted):
                expert = tiles[m, 0]
            else:
                first_k = n // work.group_tiles * work.k_tiles
            for k in cutlass.range(work.k_tiles, unroll=1):
                ring.producer_acquire(state)
                places = Tensors(
                    (None, m, first_k + k, 0),
                    (None, m, first_k + k, 0),
                    (None, n, k, expert),
                    (None, n, k, expert),
                )
                for part in range_constexpr(len(places)):
                    cute.copy(
                        atoms[part],
                        source[part][places[part]],
                        to[part][None, state.index],
                        tma_bar_ptr=ring.producer_get_barrier(state),
                        mcast_mask=masks[part],
                    )
                state.advance()
            index += work.step
        cute.arch.griddepcontrol_launch_dependents()
        ring.producer_tail(state)

    @cute.jit
    def scale_copy(self, source, target):
        """The copy of a stage's scales from shared to tensor memory, with both sides of it."""
        target = cute.filter_zeros(target)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.cta_group), self.scale_type)
        copy = tcgen05.make_s2t_copy(atom, target)
        lane = copy.get_slice(0)
        shared = lane.partition_S(cute.filter_zeros(source))
        return copy, tcgen05.get_s2t_smem_desc_tensor(copy, shared), lane.partition_D(target)

    @cute.jit
    def multiply(self, mma, base, sum_layout, buffers, layouts, ring, sums, is_leader, work):
        """The warp that issues MMAs; of a pair, that of the first CTA does it for both."""
        rows = mma.make_fragment_A(buffers.rows)
        weight = mma.make_fragment_B(buffers.weight)
        accumulators = cute.make_tensor(base, sum_layout)
        one = (None, None, None, 0)
        row_layout = blockscaled.make_tmem_layout_sfa(
            mma, self.tiler, self.group, cute.slice_(layouts.row_scale, one)
        )
        weight_layout = blockscaled.make_tmem_layout_sfb(
            mma, self.tiler, self.group, cute.slice_(layouts.weight_scale, one)
        )
        columns = self.accumulators * self.config.tile_features
        row_base = cute.recast_ptr(base + columns, dtype=self.scale_type)
        row_scale = cute.make_tensor(row_base, row_layout)
        weight_base = cute.recast_ptr(
            base + columns + tcgen05.find_tmem_tensor_col_offset(row_scale), dtype=self.scale_type
        )
        weight_scale = cute.make_tensor(weight_base, weight_layout)
        copy_rows, rows_from, rows_to = self.scale_copy(buffers.row_scale, row_scale)
        copy_weight, weight_from, weight_to = self.scale_copy(buffers.weight_scale, weight_scale)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.accumulators)
        index = work.first
        while index < work.total:
            if is_leader:
                sums.producer_acquire(free)
            product = accumulators[None, None, None, free.index]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _k in cutlass.range(work.k_tiles, unroll=1):
                if is_leader:
                    ring.consumer_wait(full)
                    at = (None, None, None, None, full.index)
                    cute.copy(copy_rows, rows_from[at], rows_to)
                    cute.copy(copy_weight, weight_from[at], weight_to)
                    for step in range_constexpr(MMAS):
                        mma.set(tcgen05.Field.SFA, row_scale[None, None, step].iterator)
                        mma.set(tcgen05.Field.SFB, weight_scale[None, None, step].iterator)
                        here = (None, None, step, full.index)
                        cute.gemm(mma, product, rows[here], weight[here], product)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    ring.consumer_release(full)
                full.advance()
            if is_leader:
                sums.producer_commit(free)
            free.advance()
            index += work.step
        if is_leader:
            sums.producer_tail(free)

    @cute.jit
    def finish(self, base, sum_layout, sums, inputs, outputs, numbers, place, work):
        """The epilogue: thread t has the t-th token of its CTA, 32 columns at a time."""
        config = self.config
        row_global, weight_global, tiles, _, slots, routing = inputs
        rank, thread, rows, features = place
        accumulators = cute.make_tensor(base, sum_layout)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(_CHUNK)), Float32)
        parts = cute.flat_divide(accumulators[(None, None), 0, 0, None], (CTA_TOKENS, _CHUNK))
        copy = tcgen05.make_tmem_copy(atom, parts[None, None, 0, 0, 0])
        source = copy.get_slice(thread).partition_S(parts)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.accumulators)
        index = work.first
        while index < work.total:
            m = index // work.tiles_n
            n = index % work.tiles_n
            inside = rank * CTA_TOKENS + thread
            row = m * config.tile_tokens + inside
            expert = Int32(0)
            is_row = row < rows
            pair = row
            if const_expr(config.sorted):
                expert = tiles[m, 0]
                is_row = inside < tiles[m, 2]
                pair = Int32(0)
                if is_row:
                    pair = slots[tiles[m, 1] + inside]
            row_factor = Float32(1.0)
            if const_expr(row_global is not None):
                row_factor = self.number(row_global, row, is_row)
            sums.consumer_wait(state)
            chunks = source[None, None, None, 0, None, state.index]
            if const_expr(config.gated):
                routed = Float32(1.0)
                if const_expr(config.sorted):
                    routed = self.number(routing, pair, is_row)
                factors = (
                    row_factor * weight_global[2 * expert],
                    row_factor * weight_global[2 * expert + 1],
                    routed,
                )
                hidden = self.gated(copy, chunks, sums, state, factors, numbers[0])
                if is_row:
                    self.store_hidden(hidden, outputs, row, n, numbers[1])
            else:
                factor = row_factor * weight_global[expert]
                self.store_sums(copy, chunks, sums, state, factor, outputs[0], (is_row, pair, n))
            state.advance()
            index += work.step

    @cute.jit
    def number(self, numbers, index, is_there):
        """An element, or 1 where there is none."""
        found = Float32(1.0)
        if is_there:
            found = numbers[index]
        return found

    @cute.jit
    def read(self, copy, chunks, j: cutlass.Constexpr):
        """32 sums of the thread's token on their way to registers; a fence follows."""
        values = cute.make_rmem_tensor(_CHUNK, Float32)
        part = chunks[None, None, None, j]
        cute.copy(copy, part, cute.make_tensor(values.iterator, self.register_layout(copy)))
        return values

    @cute.jit
    def store_sums(self, copy, chunks, sums, state, factor, y, place):
        """A row of the tile, 16 bytes at a time where the features are."""
        is_row, row, n = place
        count = const_expr(self.config.tile_features // _CHUNK)
        vector = const_expr(128 // y.element_type.width)
        features = y.shape[1]
        for j in range_constexpr(count):
            values = self.read(copy, chunks, j)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(j == count - 1):
                sums.consumer_release(state)
            for v in range_constexpr(_CHUNK // vector):
                column = n * self.config.tile_features + j * _CHUNK + v * vector
                out = cute.make_rmem_tensor(vector, y.element_type)
                for i in range_constexpr(vector):
                    out[i] = (values[v * vector + i] * factor).to(y.element_type)
                if is_row & (column < features):
                    to = (y.iterator + (Int64(row) * y.stride[0] + column)).align(16)
                    cute.autovec_copy(out, cute.make_tensor(to, cute.make_layout(vector)))

    @cute.jit
    def gated(self, copy, chunks, sums, state, factors, limit):
        """The thread's 128 hidden values in bfloat16."""
        gate_factor, up_factor, routed = factors
        hidden = cute.make_rmem_tensor(_HIDDEN_COLUMNS, BFloat16)
        count = const_expr(_HIDDEN_COLUMNS // _CHUNK)
        for j in range_constexpr(count):
            gate = self.read(copy, chunks, j)
            up = self.read(copy, chunks, j + count)
            cute.arch.fence_view_async_tmem_load()
            if const_expr(j == count - 1):
                sums.consumer_release(state)
            for i in range_constexpr(_CHUNK):
                g = codes.minimum(gate[i] * gate_factor, limit)
                u = codes.minimum(codes.maximum(up[i] * up_factor, -limit), limit)
                silu = g / (1.0 + cute.math.exp2(g * -_LOG2_E, fastmath=True))
                hidden[j * _CHUNK + i] = (silu * u * routed).to(BFloat16)
        return hidden

    @cute.jit
    def store_hidden(self, hidden, outputs, row, n, hidden_global):
        """128 hidden values of a row as codes and scales."""
        y, y_scale, y_global = outputs
        if const_expr(self.config.format is QuantFormat.NVFP4):
            words, scales = codes.quantize_nvfp4(hidden, hidden_global)
            if n == 0:
                y_global[row] = hidden_global
        else:
            words, scales = codes.quantize_fp8(hidden)
        size = const_expr(cute.size(words))
        to = cute.recast_ptr(y.iterator, dtype=Uint32)
        to = (to + (Int64(row) * (y.shape[1] // 4) + n * size)).align(16)
        cute.autovec_copy(words, cute.make_tensor(to, cute.make_layout(size)))
        # Scales of four groups, which are a word of the 128 x 4 order.
        atoms = const_expr(cute.size(scales))
        per_row = y.shape[1] // (4 * size) * atoms
        place = Int64(row // 128 * per_row + n * atoms) * 128 + row % 32 * 4 + row % 128 // 32
        target = cute.recast_ptr(y_scale.iterator, dtype=Uint32) + place
        target = cute.make_tensor(target, cute.make_layout(atoms, stride=128))
        for a in range_constexpr(atoms):
            target[a] = scales[a]

    def register_layout(self, copy):
        """The layout in which a thread receives 32 sums."""
        shape = copy.get_slice(0).partition_D(cute.make_identity_tensor((CTA_TOKENS, _CHUNK))).shape
        return cute.make_layout(shape)


def _typed(tensor, dtype, layout):
    """A tensor's memory with another element type and layout."""
    return cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=dtype), layout)


def _rows(rank):
    """Rows of bytes that TMA reads."""
    return byte_tensor(rank, multiple=16)


def _vector(dtype):
    """Numbers without gaps."""
    return make_fake_tensor(dtype, (cute.sym_int32(),), (1,), assumed_align=4)
