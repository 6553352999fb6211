"""GEMMs in CuTe DSL. Importing a module of this package needs ``nvidia-cutlass-dsl``, but for
``gemm_config``.
"""
