"""Device code: CUDA C++ sources with their loader, and CuTe DSL GEMMs. Only ``dsv4.ops`` launches kernels."""
