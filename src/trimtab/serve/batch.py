"""Prompts of several requests as one batch: left-padded, and tried at the start whether this model takes them so.

"Rows" are the requests of a batch. What a processor makes for one conversation is of two kinds: along the sequence
(tokens, masks, token types: 1 x length), or a list of items (patches, tiles, grids, sizes: items first).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.runtime.placing.load import move_inputs

Inputs = Mapping[str, Tensor]

_LOG = logging.getLogger("trimtab.serve")


def prompt_length(inputs: Inputs) -> int:
    return int(inputs["input_ids"].shape[1])


def _items_of(inputs: Inputs) -> dict[str, Tensor]:
    """The inputs that are lists of items: pixels and what describes them."""
    along_sequence = (1, prompt_length(inputs))
    return {name: x for name, x in inputs.items() if x.shape[:2] != along_sequence}


def fit_together(rows: Sequence[Inputs]) -> bool:
    """Whether items of the same name have the same shape, so that they can be listed one after the other."""
    shapes: dict[str, Any] = {}
    return all(
        shapes.setdefault(name, x.shape[1:]) == x.shape[1:] for row in rows for name, x in _items_of(row).items()
    )


def join_rows(rows: Sequence[Inputs]) -> dict[str, Tensor]:
    """One batch of the rows, in their order; a single row stays as it is.

    Example: tokens [5, 6] and [7, 8, 9] become [[6, 5, 6], [7, 8, 9]] under the mask [[0, 1, 1], [1, 1, 1]].
    """
    if len(rows) == 1:
        return dict(rows[0])
    longest = max(map(prompt_length, rows))
    items = {name for row in rows for name in _items_of(row)}
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        given = [row[name] for row in rows if name in row]
        if name in items:
            joined[name] = torch.cat(given)
            continue
        padded = []
        for row in rows:
            tokens = row["input_ids"]
            # a row without this input has none of what it marks
            x = row[name] if name in row else torch.zeros_like(tokens, dtype=given[0].dtype)
            # Padding repeats the row's own last token: a repetition penalty looks at every token, masked or not, and
            # so finds the same set as without padding. (The last token of a prompt stands for no image.)
            value = int(tokens[0, -1]) if name == "input_ids" else 0
            missing = longest - prompt_length(row)
            padded.append(functional.pad(x, (0, 0) * (x.dim() - 2) + (missing, 0), value=value))
        joined[name] = torch.cat(padded)
    return joined


# -- what the model makes of it -------------------------------------------------------------------------------------


def rows_agree(model: Any, rows: Sequence[Inputs]) -> bool:
    """Whether a batch gives every row the logits it gets alone, for its first two tokens.

    A mask that is not honoured, or positions that count padding, move logits by about their own size; rounding moves
    them by some units of the type's epsilon.
    """
    if _depends_on_length(model.config) or not fit_together(rows):
        return False
    settings = copy.deepcopy(model.generation_config)
    settings.update(max_new_tokens=2, min_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    settings.output_logits, settings.eos_token_id = True, None

    def logits_of(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = model.generate(**move_inputs(model, inputs), generation_config=settings)
        return torch.stack(found.logits, 1).float().cpu(), found.sequences[:, -2:].cpu()

    try:
        alone = [logits_of(dict(row)) for row in rows]
        together, tokens = logits_of(join_rows(rows))
    except Exception as error:  # the families' code raises whatever it likes at a batch it cannot take
        _LOG.info("a batch was tried and failed: %s", error)
        return False
    within = max(1e-3, 8 * torch.finfo(model.dtype).eps)
    for i, (logits, own) in enumerate(alone):
        same = 2 if own[0, 0] == tokens[i, 0] else 1  # near a tie the tokens differ, and all that follows
        gap = (logits[0, :same] - together[i, :same]).abs().max()
        if not gap <= within * logits.abs().max():
            return False
    return True


def _depends_on_length(config: Any) -> bool:
    """Whether rotary frequencies change with the longest row of a batch: then each row changes with the others."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {ropes.get("rope_type"), *(x.get("rope_type") for x in ropes.values() if isinstance(x, dict))}
    return bool(kinds & {"dynamic", "longrope"})
