"""A small plan, written by hand, for the tests of its file."""

from __future__ import annotations

from trimtab.plan.estimates import BalanceEstimate, Estimates, StageEstimate, VariantEstimate
from trimtab.plan.plan import (
    PLAN_VERSION,
    ClusterInput,
    DataFile,
    DataInput,
    Decisions,
    Inputs,
    ModelInput,
    PackingDecision,
    ParallelDecision,
    Plan,
    RecomputeDecision,
    ScheduleDecision,
    StageDecision,
    TableFile,
    TrainingInput,
)


def small_plan() -> Plan:
    return Plan(
        plan_version=PLAN_VERSION,
        created_by="trimtab 0.1.0",
        command="trimtab plan config.json data.jsonl --cluster 8xA100-80GB",
        summary="8 GPUs as dp 2 x pp 4. Expected step 703 ms; equal layers per stage would take 988 ms.",
        inputs=_inputs(),
        decisions=_decisions(),
        estimates=_estimates(),
        assumptions=("Images are counted as their headers say: EXIF orientation is ignored.", "yes", "1.0"),
    )


def _inputs() -> Inputs:
    return Inputs(
        model=ModelInput(
            name="Qwen2.5-VL-7B",
            family="qwen2_5_vl",
            config="config.json",
            preprocessor=None,
            max_pixels=1_003_520,
            max_tiles=None,
            num_layers=4,
            num_params=8_292_166_656,
            layers_blake2b="5f1c0a7e5f1c0a7e",
            forbidden_cuts=(),
        ),
        data=DataInput(
            files=(DataFile(path="data: \"odd\" 'name' é.jsonl", num_bytes=10, blake2b="00ff00ff00ff00ff"),),
            num_samples=3,
            num_skipped=1,
            tokens_exact=True,
            table="samples.npz",
            table_blake2b="0123456789012345",
        ),
        cluster=ClusterInput(
            device="A100-80GB",
            num_nodes=1,
            devices_per_node=8,
            device_blake2b="89abcdef89abcdef",
            node_link_bytes_per_s=25e9,
            latency_s=1e-05,
            memory_bytes=85_899_345_920,
            reserve_bytes=5_153_960_755,
        ),
        training=TrainingInput(
            dtype="bf16",
            optimizer="adamw",
            zero_stage=1,
            attention="flash",
            fused_kernels=False,
            frozen_towers=(),
            recompute="auto",
            costs="analytic",
        ),
    )


def _decisions() -> Decisions:
    return Decisions(
        parallel=ParallelDecision(dp=2, pp=2, tp=2, cp=1),
        schedule=ScheduleDecision(name="1F1B", num_microbatches=4, num_chunks=1),
        stages=(
            StageDecision(stage=0, modules=("model.visual.patch_embed", "model.visual.blocks[0..23]")),
            StageDecision(stage=1, modules=("model.language_model.layers[0..27]", "lm_head")),
        ),
        recompute=(RecomputeDecision(stage=0, granularity="full", modules=("model.visual.blocks[0..7]",)),),
        packing=PackingDecision(
            method="balanced",
            order="random",
            max_patches=36864,
            max_tokens=8192,
            seed=0,
            oversize="error",
            num_packs=2,
            num_steps=1,
            num_oversize=0,
            offsets=TableFile(file="offsets.npy", blake2b="0" * 16),
            indices=TableFile(file="indices.npy", blake2b="1" * 16),
            schedule=TableFile(file="schedule.npy", blake2b="2" * 16),
        ),
    )


def _estimates() -> Estimates:
    return Estimates(
        time_error=0.3,
        memory_error=0.1,
        step_ms=703.0,
        epoch_s=1e-05,
        samples_per_s=12.5,
        stage_imbalance=0.021,
        stages=(
            StageEstimate(
                stage=0,
                forward_ms=1.0,
                backward_ms=2.0,
                memory_gib=3.0,
                state_gib=1.0,
                activations_gib=1.0,
                transient_gib=1.0,
                reserve_gib=0.0,
            ),
        ),
        balance=BalanceEstimate(
            pad_ratio=0.0,
            dist_ratio_vit=0.005,
            dist_ratio_llm=0.02,
            dist_ratio_cost=0.01,
            utilisation=0.99,
            fill_patches=0.99,
            fill_tokens=0.9,
            shuffle_chi2=1.0,
            lower_bound_packs=2,
        ),
        variants=(
            VariantEstimate(
                name="baseline",
                packs="random, padded",
                stages="equal layers",
                recompute="all",
                step_ms=988.0,
                epoch_s=2.0,
                samples_per_s=6.0,
                idle_share=0.5,
                peak_memory_gib=70.0,
                fits=True,
            ),
        ),
    )
