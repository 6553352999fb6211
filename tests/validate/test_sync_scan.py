"""The static scan of the decode path: clean on this tree, and every pattern is found where it is planted."""

import textwrap

import pytest

from dsv4.validate.sync_scan import EXEMPTIONS, HOT_PATH, ROOT, WHY, Exemption, scan, scan_tree

PATH = "dsv4/ops/planted/cuda.py"

PLANTED = [
    ("item", "x_TE.sum().item()"),
    ("item", "f = lambda: x_TE.item()"),
    ("cpu", "y = x_TE.cpu()"),
    ("tolist", "y = positions_T.tolist()"),
    ("numpy", "y = x_TE.numpy()"),
    ("to cpu", 'y = x_TE.to("cpu", torch.float32)'),
    ("to cpu", 'y = x_TE.to(device=torch.device("cpu"))'),
    ("conversion", "y = int(position_1)"),
    ("conversion", "y = float(x_TE.abs().max())"),
    ("conversion", "y = bool(unnamed.isfinite().all())"),
    ("conversion", "length = positions_T[-1] + 1\n    y = range(length)"),
    ("conversion", "y = max(position_1, 8)"),
    ("conversion", "y = math.ceil(x_TE[0, 0])"),
    ("formatting", 'raise ValueError(f"found {position_1}")'),
    ("formatting", "y = str(plain)"),
    ("synchronize", "torch.cuda.synchronize()"),
    ("synchronize", "event.synchronize()"),
    ("comparison", "y = torch.equal(x_TE, plain)"),
    ("comparison", "y = x_TE.allclose(plain)"),
    ("branch", "if x_TE.isnan().any():\n        return None"),
    ("branch", "if unknown.max() > 3:\n        return None"),
    ("branch", "while position_1 < 4:\n        pass"),
    ("branch", "assert plain.dim() and positions_T[0] == 0"),
    ("branch", "y = 1 if not weights.bias else 2"),
    ("branch", "y = [row for row in x_TE if row[0] > 0]"),
    ("branch", "y = 0 <= position_1 < 4"),
    ("branch", "done = position_1 == 7\n    if done:\n        return None"),
    ("data-dependent shape", "y = x_TE.nonzero()"),
    ("data-dependent shape", "y = torch.nonzero(x_TE)"),
    ("data-dependent shape", "y = torch.where(x_TE > 0)"),
    ("data-dependent shape", "y = torch.masked_select(x_TE, x_TE > 0)"),
    ("data-dependent shape", "y = torch.unique(positions_T)"),
    ("data-dependent shape", "y = x_TE.repeat_interleave(positions_T, dim=0)"),
    ("boolean index", "y = x_TE[x_TE > 0]"),
    ("boolean index", "seen = positions_T >= 0\n    y = x_TE[seen]"),
    ("boolean index", "x_TE[~x_TE.isfinite(), ...] = 0"),
    ("boolean index", "y = plain[0, window_mask]"),
    ("device value as size", "y = x_TE[: position_1]"),
    ("device value as size", "y = torch.arange(positions_T[-1])"),
    ("device value as size", "y = x_TE.narrow(0, 0, position_1)"),
    ("list index", "y = x_TE[[0, 2]]"),
    ("tensor from Python data", "y = torch.tensor([1, 2], device=x_TE.device)"),
    ("tensor from Python data", "y = torch.tensor([1, 2]).to(x_TE.device, non_blocking=True)"),
    ("tensor from Python data", "y = x_TE.new_tensor([1, 2])"),
    ("stream or event per step", "event = torch.cuda.Event()"),
    ("empty_cache", "torch.cuda.empty_cache()"),
    ("print", 'print("here")'),
    ("environment", 'y = os.environ["DEBUG"]'),
    ("environment", 'y = os.getenv("DEBUG")'),
]

HARMLESS = """
    tokens, width = x_TE.shape
    if x_TE.shape[0] == 0 or x_TE.data_ptr() % 16 or plain is None:
        raise ValueError(f"found {x_TE.dtype} {list(x_TE.shape)} on {x_TE.device}")
    if plain is not None and tokens > max(8, width) and not plain.is_contiguous():
        pass
    first: list[int] = [int(size) for size in x_TE.shape if size > 1]
    y = x_TE[positions_T]
    y[0, : tokens - 1] = 0
    y = torch.where(positions_T[:, None] >= 0, y, x_TE)
    y = torch.tensor(first, dtype=torch.int64)
    y = x_TE.to(torch.float32).view(tokens, -1)
    y = position_1 + torch.arange(tokens, device=x_TE.device)
    names = dict(zip("ab", weights.rows, strict=True)).items()
    y = torch.zeros(len(first), rows.slots, device=x_TE.device)
    return y if weights.slots else None
"""


def planted(body: str, function: str = "step", path: str = PATH) -> dict[str, str]:
    """A module with one function around ``body``."""
    arguments = "x_TE, positions_T, position_1, plain: Tensor | None, weights: Weights"
    field = "class Weights:\n    bias: Tensor\n    slots: int\n\n"
    return {path: f"{field}def {function}({arguments}):\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"}


def test_the_decode_path_is_clean() -> None:
    assert [str(finding) for finding in scan_tree()] == []


@pytest.mark.parametrize(("pattern", "body"), PLANTED)
def test_a_planted_violation_is_found(pattern: str, body: str) -> None:
    found = scan(planted(body.replace("\n    ", "\n")))
    assert {finding.pattern for finding in found} == {pattern}
    assert found[0].function == "dsv4.ops.planted.cuda.step" + (".<lambda>" if "lambda" in body else "")
    assert str(found[0]).startswith(f"{PATH}:{found[0].line}: {pattern}")
    assert WHY[pattern] in str(found[0])


def test_every_pattern_is_planted() -> None:
    assert {pattern for pattern, _ in PLANTED} | {"stale exemption"} == set(WHY)


def test_shapes_and_index_tensors_are_harmless() -> None:
    assert scan(planted(HARMLESS)) == []


def test_a_violation_in_a_real_file_is_found_on_its_line() -> None:
    path = "dsv4/layers/moe.py"
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    line = next(number for number, line in enumerate(lines, 1) if line.lstrip().startswith("def __call__("))
    lines.insert(line, "        tokens_T.max().item()")
    (finding,) = scan({path: "\n".join(lines)})
    assert (finding.line, finding.function, finding.pattern) == (line + 1, "dsv4.layers.moe.MoE.__call__", "item")


@pytest.mark.parametrize("function", ["pack_weight", "_pack_codes", "_unpack", "capture", "_capture_step"])
def test_functions_of_load_and_capture_are_left_out(function: str) -> None:
    assert scan(planted("x_TE.item()", function)) == []
    assert scan(planted("x_TE.item()", "packing")) != []


def test_what_a_capture_defines_is_scanned() -> None:
    (finding,) = scan(planted("def attention():\n    y = x_TE.cpu()\ntorch.cuda.synchronize()", "capture"))
    assert (finding.function, finding.pattern) == ("dsv4.ops.planted.cuda.capture.attention", "cpu")


def test_a_field_is_a_tensor_only_if_it_is_one_in_every_class() -> None:
    body = "if weights.bias:\n    pass"
    other = {"dsv4/config.py": "class Config:\n    bias: bool\n"}
    assert [finding.pattern for finding in scan(planted(body))] == ["branch"]
    assert [finding.pattern for finding in scan(planted(body) | other)] == ["branch"], "its own file knows better"
    source = {PATH: "def step(weights):\n    if weights.bias:\n        pass\n"}
    defined = {"dsv4/quant.py": "class Weights:\n    bias: Tensor | None\n"}
    assert scan(source) == []
    assert [finding.pattern for finding in scan(source | defined)] == ["branch"]
    assert scan(source | defined | other) == []


def test_attributes_of_a_constructor_are_known() -> None:
    init = "class Ring:\n    def __init__(self):\n        self.slots = 4\n        self._tokens = torch.zeros(4)\n"
    (finding,) = scan({PATH: f"{init}\n    def read(self):\n        return int(self._tokens[int(self.slots)])\n"})
    assert (finding.function, finding.pattern) == ("dsv4.ops.planted.cuda.Ring.read", "conversion")


def test_other_files_and_module_level_are_not_the_decode_path() -> None:
    assert scan(planted("x_TE.item()", path="dsv4/checkpoint/load.py")) == []
    assert scan({PATH: "TABLE = torch.tensor([1]).tolist()\n"}) == []
    assert all((ROOT / part).exists() for part in HOT_PATH)


def test_an_exemption_covers_one_pattern_of_one_function_and_must_match() -> None:
    function = "dsv4.ops.planted.cuda.step"
    source = planted("y = x_TE.cpu()\nx_TE.item()")
    left = scan(source, [Exemption(function, "cpu", "a reason")])
    assert [finding.pattern for finding in left] == ["item"]
    (stale,) = scan(planted("pass"), [Exemption(function, "cpu", "a reason")])
    assert (stale.pattern, stale.function) == ("stale exemption", function)
    assert all(exemption.reason and exemption.pattern in WHY for exemption in EXEMPTIONS)
