"""GEMMs in CuTe DSL; importing a module of this package needs ``nvidia-cutlass-dsl``."""
