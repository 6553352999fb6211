"""Decoding with captured CUDA graphs."""

from dsv4.decode.choose import build_decoder
from dsv4.decode.cuda_graph_decoder import CUDAGraphDecoder
from dsv4.step.captured import Mode

__all__ = ["CUDAGraphDecoder", "Mode", "build_decoder"]
