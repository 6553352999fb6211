"""Hopper GEMM with packed weights: y = x · Wᵀ, or block-diagonal. The register operand of wgmma
holds dequantized weights.

Output features are the M of the MMA (64 per consumer warpgroup), tokens its N. One producer warp
fills a ring of shared memory stages, each 64 columns deep, by TMA: tokens (swizzled for wgmma),
weight bytes and block scales as they are stored. Consumers read 16 bytes per lane, dequantize one
k16 step into four registers while earlier steps' MMAs run, and keep float32 accumulators. NVFP4 and
MXFP4 scales are part of the dequantized value. FP8 block scales change every 128 columns: the
accumulators are kept in units of the current block's scale, so only a change of scale costs
anything.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.tensor_utils import LayoutEnum

from dsv4.ops.linear.cutedsl import dequantize
from dsv4.ops.linear.cutedsl.fake_tensors import byte_tensor
from dsv4.ops.linear.cutedsl.gemm_config import CHUNKS, SCALE_WORDS, SMEM_BYTES, TILE_K
from dsv4.weights.quant import QuantFormat

# k16 steps of a k tile.
STEPS = 4


class GemmConfig(NamedTuple):
    """What one compiled kernel is made for.

    A block computes ``tile_tokens`` tokens times 64 · ``warpgroups`` features, one m64 product per
    warpgroup and k16 step. ``cluster`` blocks along the features share each token tile.
    """

    format: QuantFormat
    out_dtype: type[cutlass.Numeric]
    tile_tokens: int
    warpgroups: int
    cluster: int
    multiprocessors: int


class HopperGemm:
    """The kernel of one ``GemmConfig``; call through ``jit``."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.format = config.format
        self.tile_m = 64 * config.warpgroups
        self.tile_n = config.tile_tokens
        self.row_tiles = self.tile_m // 16
        self.chunks = CHUNKS[config.format]
        self.scale_words = SCALE_WORDS.get(config.format, 0)
        self.epilogue_n = min(32, self.tile_n)
        self.epilogue_buffers = 2
        self.group_m = 16
        self.threads = 128 * (1 + config.warpgroups)
        self.producer_registers = 40 if config.warpgroups == 2 else 56
        self.consumer_registers = 232
        self.stage_bytes = 2 * self.tile_n * TILE_K + self.row_tiles * 4 * (
            128 * self.chunks + self.scale_words
        )
        out_bytes = config.out_dtype.width // 8
        epilogue_bytes = (
            64 * config.warpgroups * self.epilogue_n * self.epilogue_buffers * out_bytes
        )
        self.stages = min(16, (SMEM_BYTES - 2048 - epilogue_bytes) // self.stage_bytes)

    def signature(self) -> tuple:
        """Tensors without memory for the arguments of a call, whose sizes are free."""
        tokens = cute.sym_int32()
        k = cute.sym_int32(divisibility=64)
        features = cute.sym_int32(divisibility=64)
        strides = cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1
        x = make_fake_tensor(BFloat16, (tokens, cute.sym_int32(), k), strides, assumed_align=16)
        y = make_fake_tensor(
            self.config.out_dtype,
            (tokens, features),
            (cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )
        weight = byte_tensor(4)
        block_scale = weight
        global_scale = weight
        if self.format is QuantFormat.FP8_BLOCK128:
            columns = cute.sym_int32()
            block_scale = make_fake_tensor(
                Float32, (cute.sym_int32(), columns), (columns, 1), assumed_align=4
            )
        elif self.format is not QuantFormat.BF16:
            block_scale = byte_tensor(4)
        if self.format is QuantFormat.NVFP4:
            global_scale = make_fake_tensor(Float32, (1,), (1,), assumed_align=4)
        return x, weight, block_scale, global_scale, y

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        block_scale: cute.Tensor,
        global_scale: cute.Tensor,
        y: cute.Tensor,
        stream: CUstream,
    ):
        """x bf16 ``[T, G, K]``, weight uint8 ``[N/16, K/CK, 32, 16]``, y ``[T, N]``: feature n
        takes group n / (N/G).

        N / G must be a multiple of the features of a cluster unless G is 1. Scales are as
        ``PackedWeight`` has them; formats without a block or global scale ignore that argument.
        """
        row_tiles = weight.shape[0]
        k_tiles = x.shape[2] // TILE_K
        mma = hopper.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (64, self.tile_n),
            warpgroup.OperandSource.RMEM,
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_x = (
            load
            if const_expr(self.config.cluster == 1)
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )

        x_layout = hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (self.tile_m, self.tile_n, TILE_K), BFloat16, self.stages
        )
        x_tkg = cute.make_tensor(
            x.iterator,
            cute.make_layout(
                (x.shape[0], x.shape[2], x.shape[1]), stride=(x.stride[0], 1, x.stride[1])
            ),
        )
        tma_x, gX = cpasync.make_tiled_tma_atom(
            load_x,
            x_tkg,
            cute.slice_(x_layout, (None, None, 0)),
            (self.tile_n, TILE_K),
            num_multicast=self.config.cluster,
        )
        words = 128 * self.chunks
        weight_words = cute.make_tensor(
            cute.recast_ptr(weight.iterator, dtype=Int32),
            cute.make_layout(
                (128, self.chunks * k_tiles, row_tiles),
                stride=(1, 128, cutlass.Int64(words) * k_tiles),
            ),
        )
        weight_box = (128, self.chunks, self.row_tiles)
        weight_layout = cute.make_ordered_layout((*weight_box, self.stages), order=(0, 1, 2, 3))
        tma_weight, gW = cpasync.make_tiled_tma_atom(
            load, weight_words, cute.slice_(weight_layout, (None, None, None, 0)), weight_box
        )
        # Formats without TMA block scales pass the weights' atom, which the kernel then leaves
        # alone.
        tma_scale = tma_weight
        gS = gW
        scale_box = (max(self.scale_words, 4), 1, self.row_tiles)
        scale_layout = cute.make_ordered_layout((*scale_box, self.stages), order=(0, 1, 2, 3))
        if const_expr(self.scale_words > 0):
            scale_words = cute.make_tensor(
                cute.recast_ptr(block_scale.iterator, dtype=Int32),
                cute.make_layout(
                    (self.scale_words, k_tiles, row_tiles),
                    stride=(1, self.scale_words, cutlass.Int64(self.scale_words) * k_tiles),
                ),
            )
            tma_scale, gS = cpasync.make_tiled_tma_atom(
                load, scale_words, cute.slice_(scale_layout, (None, None, None, 0)), scale_box
            )
        # The output is stored transposed: the accumulator's rows are features, contiguous in y.
        y_mn = cute.make_tensor(
            y.iterator, cute.make_layout((y.shape[1], y.shape[0]), stride=(1, y.stride[0]))
        )
        epilogue_tile = (64, self.epilogue_n)
        y_layout = hopper.make_smem_layout_epi(
            self.config.out_dtype,
            LayoutEnum.COL_MAJOR,
            epilogue_tile,
            self.epilogue_buffers * self.config.warpgroups,
        )
        tma_y, gY = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            y_mn,
            cute.slice_(y_layout, (None, None, 0)),
            epilogue_tile,
        )

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.stages * 2]
            x: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(x_layout)], 1024]
            y: cute.struct.Align[
                cute.struct.MemRange[self.config.out_dtype, cute.cosize(y_layout)], 1024
            ]
            weight: cute.struct.Align[cute.struct.MemRange[Int32, cute.cosize(weight_layout)], 128]
            scale: cute.struct.Align[
                cute.struct.MemRange[Int32, cute.cosize(scale_layout) if self.scale_words else 4],
                128,
            ]

        self.storage = Storage
        cluster = self.config.cluster
        tiles_m = cute.ceil_div(cute.ceil_div(row_tiles, self.row_tiles), cluster)
        tiles_n = cute.ceil_div(x.shape[0], self.tile_n)
        clusters = min(tiles_m * tiles_n, self.config.multiprocessors // cluster)
        self.kernel(
            mma,
            (tma_x, tma_weight, tma_scale, tma_y),
            (gX, gW, gS, gY),
            (x_layout, weight_layout, scale_layout, y_layout),
            block_scale,
            global_scale,
            (tiles_m, tiles_n, k_tiles, cute.ceil_div(row_tiles, self.row_tiles * x.shape[1])),
        ).launch(
            grid=(clusters * cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(cluster, 1, 1),
            stream=stream,
            use_pdl=True,
            # Makes ptxas take all registers the block may have, which is what setmaxnreg
            # redistributes.
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, mma, atoms, tensors, layouts, block_scale, global_scale, counts):
        config = self.config
        tma_x, tma_weight, tma_scale, tma_y = atoms
        gX, gW, gS, gY = tensors
        x_layout, weight_layout, scale_layout, y_layout = layouts
        tiles_m, tiles_n, k_tiles, group_tiles = counts
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = (config.cluster, 1)

        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, config.cluster * config.warpgroups * 4
            ),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cluster, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
        sX = storage.x.get_tensor(x_layout.outer, swizzle=x_layout.inner)
        sY = storage.y.get_tensor(y_layout.outer, swizzle=y_layout.inner)
        sW = storage.weight.get_tensor(weight_layout)
        sS = storage.scale.get_tensor(scale_layout)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.produce(
                    ring, (tma_x, tma_weight, tma_scale), (gX, gW, gS), (sX, sW, sS), rank, counts
                )
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(
                ring, mma, tma_y, gY, (sX, sW, sS, sY), block_scale, global_scale, rank, counts
            )

    @cute.jit
    def tile_of(self, index: Int32, tiles_m: Int32, tiles_n: Int32, rank: Int32):
        """(feature tile, token tile) of a work index: bands of ``group_m`` feature tiles, features
        fastest.
        """
        band = index // (self.group_m * tiles_n)
        first = band * self.group_m
        height = cutlass.min(tiles_m - first, self.group_m)
        inside = index - band * (self.group_m * tiles_n)
        column = inside // height
        return (first + inside - column * height) * self.config.cluster + rank, column

    @cute.jit
    def produce(self, ring, atoms, tensors, buffers, rank, counts):
        """The loading warp: all k tiles of this block's work tiles, in the consumers' order."""
        tma_x, tma_weight, tma_scale = atoms
        gX, gW, gS = tensors
        sX, sW, sS = buffers
        tiles_m, tiles_n, k_tiles, group_tiles = counts
        cluster = self.config.cluster
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        # (tokens, columns, token tiles, k tiles, groups)
        tiled_x = cute.local_tile(gX, (self.tile_n, TILE_K), (None, None, None))
        x_smem, x_gmem = cpasync.tma_partition(
            tma_x,
            rank,
            cute.make_layout(cluster),
            cute.group_modes(sX, 0, 2),
            cute.group_modes(tiled_x, 0, 2),
        )
        alone = cute.make_layout(1)
        tiled_w = cute.local_tile(gW, (128, self.chunks, self.row_tiles), (None, None, None))
        w_smem, w_gmem = cpasync.tma_partition(
            tma_weight, 0, alone, cute.group_modes(sW, 0, 3), cute.group_modes(tiled_w, 0, 3)
        )
        s_smem = w_smem
        s_gmem = w_gmem
        if const_expr(self.scale_words > 0):
            tiled_s = cute.local_tile(gS, (self.scale_words, 1, self.row_tiles), (None, None, None))
            s_smem, s_gmem = cpasync.tma_partition(
                tma_scale, 0, alone, cute.group_modes(sS, 0, 3), cute.group_modes(tiled_s, 0, 3)
            )
        everyone = cutlass.Int16((1 << cluster) - 1)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        index = index // cluster
        step = blocks // cluster
        # The tokens come from the kernel before this one.
        cute.arch.griddepcontrol_wait()
        while index < tiles_m * tiles_n:
            m, n = self.tile_of(index, tiles_m, tiles_n, rank)
            # The tile of the cluster: its blocks load parts of one token tile for each other.
            group = (m - rank) // group_tiles
            for k in cutlass.range(k_tiles, unroll=1):
                ring.producer_acquire(state)
                barrier = ring.producer_get_barrier(state)
                stage = state.index
                if const_expr(cluster == 1):
                    cute.copy(
                        tma_x, x_gmem[None, n, k, group], x_smem[None, stage], tma_bar_ptr=barrier
                    )
                else:
                    cute.copy(
                        tma_x,
                        x_gmem[None, n, k, group],
                        x_smem[None, stage],
                        tma_bar_ptr=barrier,
                        mcast_mask=everyone,
                    )
                cute.copy(
                    tma_weight, w_gmem[None, 0, k, m], w_smem[None, stage], tma_bar_ptr=barrier
                )
                if const_expr(self.scale_words > 0):
                    cute.copy(
                        tma_scale, s_gmem[None, 0, k, m], s_smem[None, stage], tma_bar_ptr=barrier
                    )
                ring.producer_commit(state)
                state.advance()
            index += step
        cute.arch.griddepcontrol_launch_dependents()
        ring.producer_tail(state)

    @cute.jit
    def consume(self, ring, mma, tma_y, gY, buffers, block_scale, global_scale, rank, counts):
        """A consumer warpgroup: 64 consecutive features of every work tile."""
        sX, sW, sS, sY = buffers
        tiles_m, tiles_n, k_tiles, group_tiles = counts
        cluster = self.config.cluster
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // 128) - 1
        lane = thread % 32
        row_tile = 4 * group + (thread // 32) % 4

        thr_mma = mma.get_slice(thread % 128)
        tokens = mma.make_fragment_B(thr_mma.partition_B(sX))
        fragment = mma.make_fragment_A(mma.partition_shape_A((64, TILE_K)))
        acc = mma.make_fragment_C(mma.partition_shape_C((64, self.tile_n)))
        sources = self.sources(sW, sS, lane, row_tile)

        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        index = index // cluster
        step = blocks // cluster
        while index < tiles_m * tiles_n:
            m, n = self.tile_of(index, tiles_m, tiles_n, rank)
            row_block = (m * self.tile_m + group * 64) // 128
            if const_expr(self.format == QuantFormat.FP8_BLOCK128):
                # The last cluster may reach beyond the features.
                row_block = cutlass.min(row_block, block_scale.shape[0] - 1)
            read, release, factor = self.multiply(
                ring,
                mma,
                acc,
                fragment,
                tokens,
                sources,
                k_tiles,
                read,
                release,
                block_scale,
                row_block,
            )
            if const_expr(self.format == QuantFormat.NVFP4):
                factor = global_scale[0] * 256.0
            self.store(mma, acc, factor, tma_y, gY, sY, group, m, n)
            index += step
        # Shared memory must outlive the stores that read it.
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(
        self,
        ring,
        mma,
        acc,
        fragment,
        tokens,
        sources,
        k_tiles,
        read,
        release,
        block_scale,
        row_block,
    ):
        """acc = the products of one work tile; returns the ring's states and, for FP8, the unit of
        acc (else 1).
        """
        registers = cute.recast_tensor(fragment, Uint32)
        acc.fill(0.0)
        factor = Float32(1.0)
        if const_expr(self.format == QuantFormat.FP8_BLOCK128):
            factor = self.nonzero(block_scale[row_block, 0], Float32(1.0))
        following = factor
        ring.consumer_wait(read)
        self.dequantize_step(registers, 0, sources, read.index)
        for k in cutlass.range(k_tiles, unroll=1):
            stage = read.index
            read.advance()
            if const_expr(self.format == QuantFormat.FP8_BLOCK128):  # noqa: SIM102
                if k % 2 == 0:
                    if following != factor:
                        self.finish(acc)
                        acc.store(acc.load() * (factor / following))
                        factor = following
                    # Fetched a block ahead of its use.
                    ahead = cutlass.min(k // 2 + 1, (k_tiles - 1) // 2)
                    following = self.nonzero(block_scale[row_block, ahead], factor)
            for s in range_constexpr(STEPS):
                warpgroup.fence()
                atom = cute.make_mma_atom(mma.op)
                atom.set(warpgroup.Field.ACCUMULATE, True)
                cute.gemm(atom, acc, fragment[None, None, s], tokens[None, None, s, stage], acc)
                warpgroup.commit_group()
                # The registers dequantized next were read three steps ago.
                warpgroup.wait_group(2)
                if const_expr(s == 1):  # noqa: SIM102
                    if k > 0:
                        ring.consumer_release(release)
                        release.advance()
                if const_expr(s + 1 < STEPS):
                    self.dequantize_step(registers, s + 1, sources, stage)
                else:
                    # After the last k tile this dequantizes stale bytes that no MMA reads.
                    if k + 1 < k_tiles:
                        ring.consumer_wait(read)
                    self.dequantize_step(registers, 0, sources, read.index)
        self.finish(acc)
        ring.consumer_release(release)
        release.advance()
        return read, release, factor

    def finish(self, acc):
        """Waits for all MMAs; only then may the accumulators be read."""
        warpgroup.wait_group(0)
        for i in range(cute.size(acc)):
            acc[i] = dequantize.after_wait(acc[i])

    @cute.jit
    def nonzero(self, scale: Float32, otherwise: Float32) -> Float32:
        """A zero scale marks a block of zero codes: any other scale gives the same product, and
        divides.
        """
        if scale == 0.0:
            scale = otherwise
        return scale

    def sources(self, sW, sS, lane, row_tile):
        """What ``dequantize_step`` reads and keeps: this lane's words of a row tile."""
        words = 128 * self.chunks
        raw = cute.make_rmem_tensor((4, 2), Uint32)
        raw_scale = cute.make_rmem_tensor((max(self.scale_words // 8, 1),), Uint32)
        # (word, chunk, stage)
        lane_words = cute.make_tensor(
            cute.recast_ptr(sW.iterator, dtype=Uint32) + (lane * 4 + row_tile * words),
            cute.make_layout(
                (4, self.chunks, self.stages), stride=(1, 128, self.row_tiles * words)
            ),
        )
        words = self.scale_words
        lane_scales = cute.make_tensor(
            cute.recast_ptr(sS.iterator, dtype=Uint32)
            + (row_tile * words + lane // 4 * (words // 8)),
            cute.make_layout((max(words // 8, 1), self.stages), stride=(1, self.row_tiles * words)),
        )
        return raw, raw_scale, lane_words, lane_scales

    def dequantize_step(self, registers, s, sources, stage):
        """Fills the A registers of k16 step ``s``; a k tile is read with its first step."""
        raw, raw_scale, lane_words, lane_scales = sources
        if self.format is QuantFormat.BF16:
            cute.autovec_copy(lane_words[None, s, stage], raw[None, 0])
            values = tuple(raw[word, 0] for word in range(4))
        elif self.format is QuantFormat.FP8_BLOCK128:
            if s == 0:
                for chunk in range(2):
                    cute.autovec_copy(lane_words[None, chunk, stage], raw[None, chunk])
            values = dequantize.dequantize_fp8(
                raw[2 * (s % 2), s // 2], raw[2 * (s % 2) + 1, s // 2]
            )
        else:
            if s == 0:
                cute.autovec_copy(lane_words[None, 0, stage], raw[None, 0])
                cute.autovec_copy(lane_scales[None, stage], raw_scale)
            if self.format is QuantFormat.NVFP4:
                values = dequantize.dequantize_nvfp4(raw[s, 0], raw_scale[s // 2] >> (16 * (s % 2)))
            else:
                values = dequantize.dequantize_mxfp4(raw[s, 0], raw_scale[0] >> (16 * (s // 2)))
        for register, value in enumerate(values):
            registers[(0, register % 2, register // 2), 0, s] = value

    @cute.jit
    def store(self, mma, acc, factor, tma_y, gY, sY, group, m, n):
        """acc · factor, rounded once, through this warpgroup's share of shared memory to y."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        atom = hopper.sm90_get_smem_store_op(LayoutEnum.COL_MAJOR, config.out_dtype, Float32)
        per_quad = cute.make_copy_atom(
            cute.nvgpu.warp.StMatrix8x8x16bOp(True, 2 if self.epilogue_n == 8 else 4),
            config.out_dtype,
        )
        copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(per_quad, mma)).get_slice(
            thread % 128
        )
        destination = copy.partition_D(sY)
        # (64, epilogue_n, feature tiles of 64, token tiles)
        tiled_y = cute.local_tile(gY, (64, self.epilogue_n), (None, None))
        y_smem, y_gmem = cpasync.tma_partition(
            tma_y,
            0,
            cute.make_layout(1),
            cute.group_modes(sY, 0, 2),
            cute.group_modes(tiled_y, 0, 2),
        )
        part = cute.make_rmem_tensor(cute.shape(copy.partition_S(sY))[:3], config.out_dtype)
        size = cute.size(part)
        parts = self.tile_n // self.epilogue_n
        # Stores still reading when a buffer is written again; every work tile starts with buffer 0.
        pending = self.epilogue_buffers - 1 if parts % self.epilogue_buffers == 0 else 0
        rounded = cute.make_rmem_tensor(mma.partition_shape_C((64, self.tile_n)), config.out_dtype)
        rounded[None, 0, None].store((acc[None, 0, None].load() * factor).to(config.out_dtype))
        source = copy.retile(rounded)
        for j in range_constexpr(parts):
            buffer = group * self.epilogue_buffers + j % self.epilogue_buffers
            for v in range_constexpr(size):
                part[v] = source[j * size + v]
            if (thread // 32) % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(pending, read=True)
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            cute.copy(copy, part, destination[None, None, None, buffer])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
            if (thread // 32) % 4 == 0:
                features = m * config.warpgroups + group
                cute.copy(tma_y, y_smem[None, buffer], y_gmem[None, features, n * parts + j])
                cute.arch.cp_async_bulk_commit_group()
