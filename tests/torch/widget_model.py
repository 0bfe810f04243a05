"""A model of one's own that follows Transformers' conventions, of which trimtab holds no line. Needs torch."""

import torch
import transformers
from torch import nn


class WidgetConfig(transformers.PreTrainedConfig):
    model_type = "trimtab_widget"
    hidden_size = 32
    num_hidden_layers = 3
    num_attention_heads = 4
    vocab_size = 50
    image_size = 16
    patch_size = 4


class WidgetAttention(nn.Module):
    def __init__(self, config, *, is_causal):
        super().__init__()
        self.config, self.is_causal = config, is_causal
        self.num_heads, self.head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size, bias=False))

    def forward(self, rows):
        shape = (*rows.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (f(rows).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class WidgetBlock(nn.Module):
    def __init__(self, config, *, is_causal=True):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attn = WidgetAttention(config, is_causal=is_causal)
        self.up_proj, self.down_proj = nn.Linear(config.hidden_size, 96), nn.Linear(96, config.hidden_size)

    def forward(self, rows):
        rows = rows + self.attn(self.norm(rows))
        return rows + self.down_proj(nn.functional.gelu(self.up_proj(rows)))


class WidgetVision(transformers.PreTrainedModel):
    config_class = WidgetConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        self.patch = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.blocks = nn.ModuleList(WidgetBlock(config, is_causal=False) for _ in range(2))
        self.post_init()

    def forward(self, pixel_values):
        rows = self.patch(pixel_values).flatten(2).transpose(1, 2)
        for block in self.blocks:
            rows = block(rows)
        return rows


class WidgetText(transformers.PreTrainedModel):
    config_class = WidgetConfig

    def __init__(self, config):
        super().__init__(config)
        self.norm = nn.LayerNorm(config.hidden_size)  # made first, used last
        self.layers = nn.ModuleList(WidgetBlock(config) for _ in range(config.num_hidden_layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()

    def forward(self, input_ids):
        rows = self.embed_tokens(input_ids)
        for block in self.layers:
            rows = block(rows)
        return self.norm(rows)


class Widget(transformers.PreTrainedModel):
    config_class = WidgetConfig
    _tied_weights_keys = {"lm_head.weight": "language_model.embed_tokens.weight"}  # noqa: RUF012 - the library's name

    def __init__(self, config):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.language_model, self.vision_tower = WidgetText(config), WidgetVision(config)
        self.projector = nn.Linear(config.hidden_size, config.hidden_size)
        self.scale = nn.Parameter(torch.ones(3))
        self.post_init()

    def get_image_features(self, pixel_values):
        return self.projector(self.vision_tower(pixel_values)[:, ::4])

    def get_input_embeddings(self):
        return self.language_model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids):
        return self.lm_head(self.language_model(input_ids))
