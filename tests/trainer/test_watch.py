"""``--watch``: the trainer writes numerics.jsonl."""

from __future__ import annotations

from tests.trainer.runs import run, small_config

from halfstep import load_numerics


def config_for(corpus, policy, **overrides):
    values = {"run__max_steps": 5, "run__eval_every": 2, "run__eval_batches": 1, "run__watch": 2}
    return small_config(corpus, policy, **{**values, **overrides})


def test_watched_steps_are_in_the_folder(corpus, tmp_path):
    config = config_for(corpus, "fp16-mixed", run__grad_accum=2)
    session, ticks = run(config, tmp_path / "run")
    found = load_numerics(tmp_path / "run")
    assert [step.step for step in found] == [1, 2, 4]
    model = session.task.model
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    records = {tick.record.step: tick.record for tick in ticks}
    rows = config.run.batch_size * session.task.config.block_size
    for step in found:
        assert step.policy == str(session.precision.policy)
        assert step.applied == records[step.step].applied
        assert step.loss_scale == records[step.step].loss_scale
        weights = {one.name: one.elements for one in step.of("weight")}
        assert weights == {one.name: one.elements for one in step.of("gradient")} == sizes
        norms = {one.name: one.elements for one in step.of("activation", "activation_gradient")}
        assert norms["final_norm"] == rows * model.config.n_embd  # evaluations do not count
    assert len(model.final_norm._forward_hooks) == 1  # Precision's own
    assert "step" not in vars(session.precision)
