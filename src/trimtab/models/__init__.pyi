"""Models as data: ask Transformers, describe a family, count images and clips."""

# Asking and describing
from trimtab.models.asking.model import describe_model as describe_model
from trimtab.models.describe import read_config as read_config
from trimtab.models.description import save_description as save_description
from trimtab.models.families import Family as Family
from trimtab.models.families import FAMILIES as FAMILIES
from trimtab.specs import ImageMarkup as ImageMarkup
from trimtab.models.families import PackFormat as PackFormat

# Images and clips
from trimtab.models.describe import image_rule as image_rule
from trimtab.models.images.asked import clip_rule_of as clip_rule_of
from trimtab.options import VideoOptions as VideoOptions
from trimtab.specs import Clip as Clip
