"""Decoding with captured CUDA graphs."""

from dsv4.decode.captured_step import Mode
from dsv4.decode.choose import build_decoder, check_cuda_graph
from dsv4.decode.cuda_graph_decoder import CUDAGraphDecoder

__all__ = ["CUDAGraphDecoder", "Mode", "build_decoder", "check_cuda_graph"]
