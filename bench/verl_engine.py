"""verl's own FSDP engine with the drop-in for vision data parallel: one training step on two CPU ranks, gradients
compared with those of the same step without it.

    pip install torch==2.13.0 'transformers>=5.10,<5.11' 'trimtab[torch]' verl==0.9.1    # an environment of its own
    python bench/verl_engine.py

verl's is what runs: `FSDPEngineWithLMHead.initialize` and `forward_backward_batch` on FSDP2 with Ulysses over both
ranks, its monkey patch of Qwen2.5-VL, its loss. Three things stand in for what a CPU has not: a platform "cpu" (verl's
own extension point; the engine is otherwise registered for cuda and npu alone), gloo, and PyTorch's attention where
verl calls a flash kernel.
"""

import json
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

NUM_RANKS = 2
IMAGE, VIDEO, START, END = 200, 201, 202, 203
GRIDS = [(1, 4, 8), (1, 8, 8), (1, 4, 4), (1, 12, 8), (1, 2, 2)]  # five images: patches as t x h x w


def save_model(folder: Path) -> None:
    """A tiny Qwen2.5-VL with random weights."""
    import transformers

    text = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "vocab_size": 208}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 70, "num_heads": 4, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={**vision, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
        text_config={**text, **heads, "rope_parameters": rope, "max_position_embeddings": 1024},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def use_cpu() -> None:
    """verl's platform for a machine without an accelerator, and PyTorch's attention in place of the flash kernels."""
    from verl.models.transformers import qwen2_vl
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):  # type: ignore[misc]
        device_name = "cpu"

        @property
        def device_module(self) -> ModuleType:
            return torch.cpu

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

        def empty_cache(self) -> None:
            pass

    set_platform(Cpu())

    def attention(q: Any, k: Any, v: Any, *_: Any, is_causal: bool = True, **__: Any) -> Any:
        rows = [x.transpose(1, 2) for x in (q, k, v)]  # (batch, heads, tokens, width)
        return torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=is_causal).transpose(1, 2)

    def packed_attention(q: Any, k: Any, v: Any, cu_seqlens_q: Any, causal: bool = True, **_: Any) -> Any:
        lengths = cu_seqlens_q.diff().tolist()  # of the sequences in one row: (tokens, heads, width)
        parts = zip(*(x[None].split(lengths, dim=1) for x in (q, k, v)), strict=True)
        return torch.cat([attention(*part, is_causal=causal) for part in parts], dim=1)[0]

    qwen2_vl._flash_attention_forward = attention
    qwen2_vl.flash_attn_varlen_func = packed_attention
    qwen2_vl._flash_use_top_left_mask = False
    qwen2_vl._flash_supports_window_size = False
    qwen2_vl._flash_supports_deterministic = False
    qwen2_vl.fa_peft_integration_check = lambda q, k, v, **_: (q, k, v)


def make_engine(folder: Path) -> Any:
    """verl's engine over both ranks, which form one Ulysses group."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=NUM_RANKS,
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_batch() -> Any:
    """One sample with five images, as verl's trainer hands it to the engine: nested rows, images beside them."""
    from verl.utils import tensordict_utils as tu

    torch.manual_seed(1)
    pieces = [torch.randint(3, 190, (6,))]
    for frames, height, width in GRIDS:
        rows = frames * height * width // 4
        pieces += [torch.tensor([START]), torch.full((rows,), IMAGE), torch.tensor([END]), torch.randint(3, 190, (4,))]
    ids = torch.cat(pieces)
    grid = torch.tensor(GRIDS)
    images = {"pixel_values": torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14), "image_grid_thw": grid}
    positions = torch.arange(len(ids)).repeat(4, 1)
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    return tu.get_tensordict(
        {
            "input_ids": nested([ids]),
            "position_ids": torch.nested.nested_tensor_from_jagged(
                positions, offsets=torch.tensor([0, len(ids)]), jagged_dim=2
            ),
            "loss_mask": nested([torch.ones(len(ids))]),
            "multi_modal_inputs": [images],
        },
        {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    )


def gradients(engine: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """verl's loss and every parameter's whole gradient after one `forward_backward_batch`."""
    from verl.workers.utils.losses import sft_loss

    engine.optimizer_zero_grad()
    with engine.train_mode():
        output = engine.forward_backward_batch(make_batch(), partial(sft_loss, None))
        named = engine.module.named_parameters()
        found = {name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None}
    return float(output["loss"][0]), found


def rank_main(rank: int, folder: str, port: int) -> None:
    """One rank: the step without the drop-in, and with it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    use_cpu()
    from verl.utils.import_utils import import_external_libs

    from trimtab.runtime.vision.hooks import holder_of

    engine = make_engine(Path(folder))
    loss, expected = gradients(engine)
    import_external_libs("trimtab.runtime.vision.patched")  # as verl does with `model.external_lib`
    shared_loss, found = gradients(engine)
    handle = holder_of(engine.module.model.visual)
    assert handle is not None, "the tower was not shared"
    missing = expected.keys() ^ found.keys()
    assert not missing, missing
    errors = {x: float((found[x] - g).norm() / g.norm().clamp_min(1e-12)) for x, g in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    encoded = [None] * NUM_RANKS
    dist.all_gather_object(encoded, handle.load.patches)
    if rank == 0:
        told = {
            "parameters": len(expected),
            "of_the_tower": sum(".visual." in name for name in expected),
            "loss": loss,
            "loss_shared": shared_loss,
            "largest_relative_error_of_a_gradient": errors[worst],
            "at": worst,
            "patches_encoded_by_rank": encoded,
        }
        print(json.dumps(told))
    assert errors[worst] < 1e-5, f"the gradient of {worst} is off by {errors[worst]:.1e} of itself"
    dist.destroy_process_group()


def main() -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        save_model(Path(folder))
        mp.start_processes(rank_main, (folder, port), nprocs=NUM_RANKS)


if __name__ == "__main__":
    sys.exit(main())
