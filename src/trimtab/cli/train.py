"""`trimtab train`: carry a plan out, alone or on the processes that torchrun started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.data import (
    AllowOutsideOption,
    ExifOption,
    MediaRootOption,
    SpecialTokensOption,
    TemplateOption,
    TokenizerOption,
)
from trimtab.cli.output import JsonOption, print_json


def train(
    plan: PlanArgument,
    model: Annotated[Path, typer.Argument(help="Folder with config.json, preprocessor, tokenizer and weights.")],
    out: Annotated[Path, typer.Option(help="Folder for run.jsonl and checkpoints.")] = Path("run"),
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps in all; else --epochs.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the plan's packs.")] = 1,
    optimizer: Annotated[str, typer.Option(help="A class of torch.optim.")] = "AdamW",
    optimizer_option: Annotated[
        list[str] | None, typer.Option(help="For its constructor, as in weight_decay=0.1; repeatable.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-5,
    warmup: Annotated[int, typer.Option(min=0, help="Steps up to the peak.")] = 0,
    decay: Annotated[Literal["constant", "linear", "cosine"], typer.Option(help="After the warm-up.")] = "constant",
    clip: Annotated[float, typer.Option(min=0, help="Largest norm of all gradients together; 0: as they are.")] = 1.0,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16: autocast over float32 weights.")
    ] = "bfloat16",
    attention: Annotated[
        Literal["sdpa", "eager", "flash_attention_2"] | None, typer.Option(help="Default: the plan's, where it runs.")
    ] = None,
    loss: Annotated[Literal["token", "sample"], typer.Option(help="What weighs the same in the loss.")] = "token",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw weights instead of reading them.")
    ] = False,
    device: Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Default: cuda where there is one.")] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints; else one at the end.")
    ] = None,
    no_save: Annotated[bool, typer.Option("--no-save", help="Write no checkpoint: a run that only measures.")] = False,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints that stay.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    export: Annotated[
        Path | None, typer.Option(help="New folder for the trained model, as Transformers loads it.")
    ] = None,
    vision_dp: Annotated[
        Literal["plan", "dispatch", "off"],
        typer.Option(help="Do data-parallel ranks share images: as planned, whatever is planned, or never."),
    ] = "plan",
    no_verify_packing: Annotated[
        bool, typer.Option("--no-verify-packing", help="Do not check that the model keeps samples of a pack apart.")
    ] = False,
    on_bad: Annotated[
        Literal["error", "filler"], typer.Option(help="A sample that cannot be read: stop, or a filler without weight.")
    ] = "error",
    tokenizer: TokenizerOption = None,
    chat_template: TemplateOption = None,
    special_tokens: SpecialTokensOption = "template",
    media_root: MediaRootOption = None,
    allow_outside: AllowOutsideOption = False,
    exif: ExifOption = "ignore",
    workers: Annotated[int, typer.Option(min=0, help="Processes per rank that make samples.")] = 0,
    seed: Annotated[int, typer.Option(help="Of drawn weights and dropout.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train MODEL as PLAN says: `torchrun --nproc-per-node N --no-python trimtab train PLAN MODEL`, or alone."""
    from trimtab.runtime.data.conversations import ReadingOptions
    from trimtab.runtime.training.loop import train as run
    from trimtab.runtime.training.settings import TrainSettings

    settings = TrainSettings(
        plan=plan,
        model=model,
        out=out,
        reading=ReadingOptions(
            tokenizer=tokenizer,
            chat_template=chat_template,
            special_tokens=special_tokens,
            media_root=media_root,
            allow_outside=allow_outside,
            exif=exif,
        ),
        steps=steps,
        epochs=epochs,
        optimizer=optimizer,
        optimizer_options=parse_options(optimizer_option or []),
        learning_rate=lr,
        warmup_steps=warmup,
        decay=decay,
        max_grad_norm=clip or None,
        dtype=dtype,
        attention=attention,
        loss_weighting=loss,
        random_weights=random_weights,
        device=device,
        save=not no_save,
        save_every=save_every,
        keep=keep,
        resume=resume,
        export=export,
        verify_packing=not no_verify_packing,
        vision_dp=vision_dp,
        on_bad_sample="raise" if on_bad == "error" else "filler",
        workers=workers,
        seed=seed,
    )
    records = run(settings)
    if as_json and os.environ.get("RANK", "0") == "0":
        print_json(
            {"steps": len(records), "loss": records[-1].loss if records else None, "log": str(out / "run.jsonl")}
        )


def parse_options(given: list[str]) -> dict[str, Any]:
    """weight_decay=0.1, betas=0.9,0.95, nesterov=true."""
    from trimtab.errors import TrimtabError

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise TrimtabError(f"optimizer option {text!r} is no NAME=VALUE: write it as in weight_decay=0.1")
        parts = [_value(part, text) for part in value.split(",")]
        options[name] = parts[0] if len(parts) == 1 else tuple(parts)
    return options


def _value(text: str, whole: str) -> float | bool:
    from trimtab.errors import TrimtabError

    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        raise TrimtabError(
            f"optimizer option {whole!r} has a value that is no number, true or false: write it as in weight_decay=0.1"
        ) from None
