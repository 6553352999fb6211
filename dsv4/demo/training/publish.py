"""Makes the shipped folder from a training run: NVIDIA's layout, calibrated ``input_scale``,
tokenizer, configuration.

python -m dsv4.demo.training.publish runs/demo dsv4/demo/checkpoint-new
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from dsv4.checkpoint.export import export
from dsv4.checkpoint.names import Dialect
from dsv4.command.flags import OneLineParser
from dsv4.command.program import command, run_program
from dsv4.demo.training import fast_forward, weights
from dsv4.demo.training.data import BatchShape, Request, training_batch
from dsv4.demo.training.fast_attention import Options
from dsv4.demo.training.fast_forward import Kernels
from dsv4.demo.training.geometry import CONFIG
from dsv4.demo.training.trainer import TOKENIZER
from dsv4.weights.codes import E2M1_MAX, E4M3_MAX

GENERATION_CONFIG = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": False,
    "transformers_version": "4.46.3",
}
CALIBRATION = BatchShape(length=512, rows=16, recall_share=0.25)


def expert_amax(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Largest magnitude that enters each expert's w1 and w3 (``w13``) and w2, float32 ``[X]`` per
    layer prefix.
    """
    found: dict[str, Tensor] = {}

    def watch(prefix: str, moe: Any):
        def hook(_: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, 1)
            (_, routing_weights, indices) = outputs
            bank = moe.experts
            for expert in range(bank.num_experts):
                token, slot = torch.where(indices == expert)
                gate, up = F.linear(x[token], bank.gate_up_proj[expert]).chunk(2, dim=-1)
                hidden = F.silu(gate.clamp(max=bank.limit)) * up.clamp(-bank.limit, bank.limit)
                hidden = hidden * routing_weights[token, slot, None]
                for part, value in (("w13", x[token]), ("w2", hidden)):
                    found[f"{prefix}.{expert}.{part}"] = (
                        value.abs().amax() if len(token) else torch.zeros(())
                    )

        return hook

    hooks = [
        layer.mlp.gate.register_forward_hook(watch(f"layers.{index}.ffn.experts", layer.mlp))
        for index, layer in enumerate(model.model.layers)
    ]
    kernels = Kernels(fast_forward.plain_sinkhorn, fast_forward.block)
    ropes = fast_forward.rope_tables(model, ids.shape[1], "cpu")
    with torch.no_grad():
        fast_forward.forward(model, ids, ropes, Options(select=True), kernels)
    for handle in hooks:
        handle.remove()
    return found


def calibrated(tensors: dict[str, Tensor], amax: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with ``input_scale`` = amax / (6 · 448); an expert nothing was routed to gets its
    layer's largest.
    """
    for name in tensors:
        if name.endswith(".input_scale"):
            prefix, expert, projection, _ = name.rsplit(".", 3)
            part = "w2" if projection == "w2" else "w13"
            value = amax[f"{prefix}.{expert}.{part}"]
            if value == 0:
                value = torch.stack(
                    [v for key, v in amax.items() if key.startswith(prefix) and key.endswith(part)]
                ).amax()
            tensors[name] = (value / (E2M1_MAX * E4M3_MAX)).float().reshape(tensors[name].shape)
    return tensors


def publish(run: Path, destination: Path) -> None:
    """Writes the folder ``destination`` (new) from the parts that the last training phase saved in
    ``run``.
    """
    state = weights.load_shards(run)
    model = weights.load_model(run)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder)
        save_file(state, plain / "model.safetensors")
        config = {key: value for key, value in CONFIG.items() if key != "expert_dtype"}
        (plain / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (plain / "generation_config.json").write_text(
            json.dumps(GENERATION_CONFIG, indent=2) + "\n", encoding="utf-8"
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER.with_name(name), plain / name)
        export(plain, destination, "nvfp4-experts", Dialect.NATIVE)
    batch = training_batch(Request(str(TOKENIZER), 99, 0, CALIBRATION))
    ids = torch.from_numpy(batch[0, :, :-1]).long()
    (file,) = destination.glob("*.safetensors")
    save_file(calibrated(load_file(file), expert_amax(model, ids)), file, metadata={"format": "pt"})
    file.chmod(0o644)


@command
def main() -> int:
    """Command line: run folder, new folder."""
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("destination", type=Path)
    arguments = parser.parse_args()
    publish(arguments.run, arguments.destination)
    size = sum(file.stat().st_size for file in arguments.destination.iterdir())
    vocabulary = Tokenizer.from_file(str(TOKENIZER)).get_vocab_size()
    print(f"{arguments.destination}: {size} bytes, vocabulary {vocabulary}")
    return 0


if __name__ == "__main__":
    run_program(main)
