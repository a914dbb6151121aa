"""The rows that environments of `verifiers` are played on. The package itself cannot be installed beside the tests'."""

from typing import Any

from engine.environments.verifiers import input_of, rows_of
from engine.trajectory import Prompt

ROW = {"prompt": [{"role": "user", "content": "1+1"}], "example_id": 7, "answer": "2", "info": {"hard": False}, "x": 1}


class Sums:
    """What `rows_of` asks of an environment."""

    def get_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return [ROW, ROW][: n if n >= 0 else None]

    def get_eval_dataset(self, n: int = -1) -> list[dict[str, Any]]:
        return [{**ROW, "answer": "3"}]


def test_a_row_of_the_file_is_the_input_of_a_rollout() -> None:
    (row,) = rows_of(Sums(), 1)
    assert row == {"messages": ROW["prompt"], "example_id": 7, "answer": "2", "info": {"hard": False}}
    assert len(rows_of(Sums())) == 2 and rows_of(Sums(), evaluation=True)[0]["answer"] == "3"
    given = input_of(Prompt(row=0, text="user: 1+1", fields=row))
    assert given == {"prompt": ROW["prompt"], "example_id": 7, "answer": "2", "info": {"hard": False}}
    assert input_of(Prompt(row=4, text="1+1")) == {"prompt": ROW["prompt"], "example_id": 4}
