"""How long a batch takes to reach the ranks of a trainer on one machine.

    python benchmarks/ranks.py [--ranks 4] [--groups 64] [--tokens 1000] [--rounds 5]

The ranks have a tiny model and only read the batch: what is measured is packing, sending and unpacking. Prints the
seconds of a call from its start to the last answer (the median), the CPU seconds of the process that sends, and the
bytes of the packed batch.
"""

import argparse
import json
import os
import pickle
import statistics
import tempfile
import time
from contextlib import closing

from transformers import LlamaConfig, LlamaForCausalLM

from engine.protocols import Batch
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup


def batch_of(groups: int, tokens: int) -> Batch:
    """Groups of 8 trajectories."""

    def trajectory(seed: int) -> Trajectory:
        one = Trajectory(prompt_ids=list(range(100)), reward=1.0, finish_reason="stop")
        ids = [(seed * 7919 + place * 104_729) % 150_000 for place in range(tokens)]
        one.extend(ids, [-1.0 / (1 + place) for place in range(tokens)], [Span(0, tokens, 0)])
        return one

    made = [
        TrajectoryGroup(group=id, prompt=Prompt(row=id, text="x"), trajectories=[trajectory(id + n) for n in range(8)])
        for id in range(groups)
    ]
    return Batch(step=0, groups=made, staleness=[0] * groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("groups", 64), ("tokens", 1000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    batch = batch_of(asked.groups, asked.tokens)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as path:
        LlamaForCausalLM(config).save_pretrained(path)
        settings = TrainerSettings(device="cpu", learning_rate=1e-3, ranks=asked.ranks, threads=1)
        with closing(RankedTrainer(path, settings)) as trainer:
            times, cpu = [], []
            for _ in range(asked.rounds):
                began, used = time.perf_counter(), time.process_time()
                trainer._call("watch_progress", batch)  # which only keeps its argument
                times.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
    figures = {"ranks": asked.ranks, "tokens": asked.groups * 8 * asked.tokens, "cores": os.cpu_count()}
    figures |= {"packed_bytes": len(pickle.dumps(batch)), "seconds": round(statistics.median(times), 3)}
    print(json.dumps(figures | {"sender_cpu_seconds": round(statistics.median(cpu), 3)}))


if __name__ == "__main__":
    main()
