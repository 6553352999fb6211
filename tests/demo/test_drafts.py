"""The draft modules that are trained are those that the engine runs, from the folder that training
writes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4 import Engine, EngineConfig
from dsv4.demo import CHECKPOINT, DRAFTS
from dsv4.demo.training.draft_nets import BLOCK, DSparkNet, base_values
from dsv4.demo.training.draft_trainer import DraftTrainer
from dsv4.demo.training.drafts import main
from dsv4.opened_draft import FLAG_OF_KIND
from dsv4.speculative.drafter import Proposal
from dsv4.weights.parameters import MtpKind

pytest.importorskip("transformers")
LENGTH = 256
ANCHORS = (1, 5, 127, 128, 129, 200, 250)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Key rows are rounded to 8 bit in both, at times to neighbouring codes."""
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())


def proposal(engine: Engine, ids: list[int], token: int, count: int) -> Proposal:
    """Drafts behind ``token``, each after the token that the sequence has."""
    engine.reset()
    engine.prefill(ids)
    following = iter(IDS[len(ids) + 1 :])

    def given(logits_V: Tensor, position: int) -> Tensor:
        return torch.tensor(next(following))

    drafter = engine.steps.drafter  # pyright: ignore[reportAttributeAccessIssue]
    with torch.inference_mode():
        return drafter.propose(token, len(ids), count, given)


IDS = torch.randint(3, 2500, (LENGTH + 1,), generator=torch.Generator().manual_seed(0)).tolist()


def trained_engine(kind: MtpKind, folder: Path) -> tuple[DraftTrainer, Engine]:
    """A trainer after one step from initial values, and the engine on its folder."""
    torch.manual_seed(0)
    trainer = DraftTrainer(kind, "cpu", compiled=False)
    batch = torch.tensor([[IDS, IDS[::-1]], [[1] * len(IDS)] * 2], dtype=torch.int16)
    before = {name: master.clone() for name, master in trainer.masters.items()}
    trainer.step(batch, 1e-3)
    still = [name for name, master in trainer.masters.items() if torch.equal(master, before[name])]
    assert still == []
    trainer.set_forward_values()
    trainer.publish(folder)
    exact: dict[str, Any] = {"device": "cpu", "compute_dtype": "float32", "max_context": 512}
    flag: Any = FLAG_OF_KIND[kind]
    config = EngineConfig(**exact, draft=flag, draft_weights=str(folder))
    return trainer, Engine.load(CHECKPOINT, config)


@pytest.mark.slow
def test_classic_rows_are_those_of_the_engine(tmp_path: Path) -> None:
    trainer, engine = trained_engine("classic", tmp_path / "draft")
    ids = torch.tensor([IDS])
    net: Any = trainer.net
    trainer.result(torch.tensor([[IDS], [[1] * len(IDS)]], dtype=torch.int16))
    seen = base_values(trainer.base, ids[:, :-1], trainer.ropes[LENGTH], trainer.kernels)
    found = []
    hook = net.core.model.norm.register_forward_hook(lambda *io: found.append(io[2]))
    with torch.no_grad():
        net(trainer.base, seen, torch.stack((ids, ids)), trainer.ropes[LENGTH], trainer.kernels)
        logits = trainer.base.lm_head(found[0])[0]
    hook.remove()
    for anchor in ANCHORS:
        got = proposal(engine, IDS[:anchor], IDS[anchor], 1).logits_NV[0]
        assert_near(got, logits[anchor - 1])


@pytest.mark.slow
def test_dspark_blocks_are_those_of_the_engine(tmp_path: Path) -> None:
    trainer, engine = trained_engine("dspark", tmp_path / "draft")
    ids = torch.tensor([IDS])
    net = trainer.net
    assert isinstance(net, DSparkNet)
    trainer.result(torch.tensor([[IDS], [[1] * len(IDS)]], dtype=torch.int16))
    ropes = trainer.ropes[LENGTH]
    seen = base_values(trainer.base, ids[:, :-1], ropes, trainer.kernels)
    anchor = torch.tensor(ANCHORS)
    slots = anchor[:, None] + torch.arange(BLOCK)
    row = torch.zeros_like(anchor)
    with torch.no_grad():
        streams = net._streams(
            trainer.base, seen, (ids, row, anchor, slots), ropes, trainer.kernels
        )
        hidden = net.collapsed(streams)[1]
        markov = net.markov_w1[ids[row[:, None], slots]] @ net.markov_w2.T
        logits = trainer.base.lm_head(hidden) + markov
    for index, at in enumerate(ANCHORS):
        got = proposal(engine, IDS[:at], IDS[at], BLOCK).logits_NV
        assert_near(got, logits[index])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_a_run_goes_on_where_it_was_saved(kind: MtpKind, tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = DraftTrainer(kind, "cpu", compiled=False)
    batch = torch.tensor([[IDS], [[1] * len(IDS)]], dtype=torch.int16)
    one.step(batch, 1e-3)
    one.save(tmp_path / "state.pt", {"step": 1})
    torch.manual_seed(1)
    other = DraftTrainer(kind, "cpu", compiled=False)
    assert other.load(tmp_path / "state.pt") == {"step": 1}
    for trainer in (one, other):
        torch.manual_seed(2)
        trainer.step(batch, 1e-3)
    assert [n for n, m in one.masters.items() if not torch.equal(m, other.masters[n])] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "dspark"])
def test_a_run_starts_from_a_folder_with_what_the_folder_says(kind: MtpKind) -> None:
    torch.manual_seed(1)
    trainer = DraftTrainer(kind, "cpu", compiled=False)
    trainer.start_from(DRAFTS[FLAG_OF_KIND[kind]])
    trainer.set_forward_values()
    for name, parameter in trainer.trained.items():
        assert torch.equal(parameter, trainer.masters[name]), name


def test_a_gpu_that_is_not_there_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "run"
    assert main(["mtp", "--minutes", "0", "--workers", "1", "--tiny", "--out", str(out)]) == 2
    assert capsys.readouterr().err == "error: --device cuda: found no CUDA device, expected one\n"
    assert not out.exists()
