"""`engine.train` in a script whose reward and loss no other process can import, on Ray. That a resume takes them again
is shown in one process: `tests/test_api.py`."""

import json
import sys
from pathlib import Path
from runpy import run_path

import pytest
from chat_tokenizers import save_chat_model

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster", "own_signals")]

SCRIPT = """
import json
import sys

import engine
from engine.protocols import needs

VALUES = {"1+1=": 0.25, "2+1=": 0.75}


def score(prompt, trajectory):
    return VALUES[prompt.text]


@needs(zero_advantages=True)
def loss(terms, scale):
    return -scale * terms.current, {"trained": terms.current.isfinite()}


own = {"trainer.loss": loss}
run = engine.train(
    sys.argv[1],
    [{"prompt": text} for text in VALUES],
    score,
    max_steps=2,
    plain=True,
    **{
        "scheduler.train_batch_size": 2, "scheduler.samples_per_prompt": 2, "rollout.slots": 2,
        "rollout.replicas": 1, "rollout.max_tokens": 4, "trainer.threads": 1,
        "trainer.loss_arguments": {"scale": 2.0}, **own,
    },
)
assert len(run.metrics) == 2
rewards = sorted({row["reward"] for row in run.samples()})
measured = [*run.metrics["loss_trained"]]
print(json.dumps([run.outcome, str(run.run_dir), str(run.model_path), len(run.metrics), rewards, measured]))
"""


def test_a_script_trains_with_its_own_reward_and_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["script.py", save_chat_model(tmp_path / "model", "chatml", context=64)])
    run_path("script.py", run_name="__main__")
    *shown, result = capsys.readouterr().out.strip().splitlines()
    outcome, run_dir, checkpoint, steps, rewards, measured = json.loads(result)
    assert (outcome, steps, rewards, measured) == ("finished", 2, [0.25, 0.75], [1.0, 1.0])
    assert Path(checkpoint).is_relative_to(run_dir) and (Path(checkpoint) / "model.safetensors").is_file()
    assert any(line.startswith("run: runs/") for line in shown)
    assert any(line.startswith("step=1 done=2/2 ") for line in shown), shown
