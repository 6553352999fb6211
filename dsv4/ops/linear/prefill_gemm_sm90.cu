// Prefill products with wgmma: Hopper only (sm_90a).
#define WGMMA 1
#include "prefill_gemm.cuh"
