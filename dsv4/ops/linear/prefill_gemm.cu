// Prefill products with mma.sync: every architecture.
#define WGMMA 0
#include "prefill_gemm.cuh"
