"""A machine that executes compiled PTX on the CPU, and the host function in front of it.

::

    options = f"--keep-ptx --dump-dir={folder}"
    compiled = CompiledKernel.of(jit.compile_kernel(HopperGemm, config, "sm_90a", options))
    run_kernel(compiled, [x, weight, scale, total, y], SCHEDULES["late"])

``run_kernel`` (``tests.ptx.run``) takes what a call on a GPU takes: torch tensors, here on the CPU,
or numpy arrays, and numbers. The host half of the compiled object is relocated into memory and
called with a driver that writes down its launches; the PTX of each launch is executed, and the
results are in the arguments. Kernels may touch the bytes of these tensors and nothing else.
``record_launches`` stops after the host half: grid, cluster, shared memory, attributes, tensor maps
(``TensorMap.decode``). ``run_recorded`` (``tests.ptx.nvrtc``) executes a recorded launch of a CUDA
C++ kernel, if need be with all of its blocks at once (``resident``): as one cluster, of any size.
Blocks hand words to each other by relaxed stores, which others see when the schedule wants.

A ``Schedule`` resolves what the ISA leaves open: when copies and products happen between their
issue and the wait for them, in which order warps and diverged lanes run, which lane is elected.
``SCHEDULES`` has eight of them, ``random_schedule(seed)`` makes more. What the ISA forbids raises
its own exception of ``tests.ptx.faults``. Registers, shared memory and tensor memory start as 0xFF
bytes.

| modules | hold |
|---|---|
| ``syntax``, ``parse`` | PTX text as data |
| ``operands``, ``program``, ``warp`` | rows of 32 lanes, handlers of instructions, divergence |
| ``scalar``, ``alu``, ``bits``, ``convert``, ``floats``, ``exchange`` | instructions of threads |
| ``memory``, ``load_store``, ``atomics`` | global and shared memory |
| ``copies`` | cp.async and st.async of every lane |
| ``barriers``, ``asynchronous``, ``clock`` | what waits for what |
| ``schedule``, ``cluster`` | who is next |
| ``tensor_map``, ``tma``, ``tma_store`` | tensor copies |
| ``descriptors``, ``wgmma``, ``tensor_memory``, ``umma``, ``umma_operands`` | matrix products |
| ``mma`` | matrix products of one warp |
| ``tensor_core``, ``rounding`` | the arithmetic of matrix products |
| ``host``, ``driver``, ``launch``, ``run``, ``nvrtc`` | the host function and the ways in |
| ``edits``, ``planted``, ``kernels`` | faults planted into kernels, which the machine must find |

The machine does not know: missing fences other than fence.proxy.async, memory orders (all stores
but relaxed ones to global memory are seen at once), time (%clock64 counts instructions), caches,
programmatic dependent launches (each launch runs alone, and its clusters one after the other), and
what ptxas makes of PTX. Approximate instructions return the correctly rounded value. An instruction
it does not know raises ``Unsupported`` when it is reached.
"""
