"""Every public name, once: `__init__.py` reads this file when a name is first used, type checkers and editors too.

The comments are the headings of the reference in the documentation (docs/conf.py).
"""

# Models
from trimtab.models.describe import describe as describe
from trimtab.models.asking.model import describe_model as describe_model
from trimtab.models.describe import read_config as read_config
from trimtab.models.description import save_description as save_description
from trimtab.models.image_rules import image_rule as image_rule
from trimtab.specs import ModelSpec as ModelSpec
from trimtab.models.families.family import Family as Family
from trimtab.models.families.known import FAMILIES as FAMILIES
from trimtab.specs import ImageMarkup as ImageMarkup

# Data
from trimtab.samples.size import size_samples as size_samples
from trimtab.samples.table import (
    SizingResult as SizingResult,
    save_sizing as save_sizing,
    load_sizing as load_sizing,
)
from trimtab.options import ReadingOptions as ReadingOptions
from trimtab.specs import SampleTable as SampleTable
from trimtab.models.images.clips import clip_rule_of as clip_rule_of
from trimtab.options import VideoOptions as VideoOptions
from trimtab.specs import Clip as Clip
from trimtab.demo.draw import draw_dataset as draw_dataset
from trimtab.demo.draw import write_model as write_demo_model

# Packing
from trimtab.balance.packing import (
    pack_samples as pack_samples,
    report_packing as report_packing,
)
from trimtab.balance.cost import LinearCost as LinearCost
from trimtab.specs import (
    Packing as Packing,
    Schedule as Schedule,
)

# Devices and costs
from trimtab.costs.devices import (
    find_device as find_device,
    parse_cluster as parse_cluster,
)
from trimtab.specs import (
    DeviceSpec as DeviceSpec,
    ClusterSpec as ClusterSpec,
)
from trimtab.costs.profile import (
    profile_model as profile_model,
    save_profile as save_profile,
    load_profile as load_profile,
)
from trimtab.costs.traced import profile_traced as profile_traced
from trimtab.costs.timed import (
    profile_timed as profile_timed,
    TimingOptions as TimingOptions,
    open_device as open_device,
)
from trimtab.specs import (
    Profile as Profile,
    ParallelDims as ParallelDims,
)

# Plans
from trimtab.plan.build import make_plan as make_plan
from trimtab.plan.options import PlanOptions as PlanOptions
from trimtab.lora import Lora as Lora
from trimtab.plan.options import VisionChoice as VisionChoice
from trimtab.plan.file.figures import PlanDetails as PlanDetails
from trimtab.plan.build import write_plan as write_plan
from trimtab.plan.file.yaml import load_plan as load_plan
from trimtab.plan.file.check import check_plan as check_plan
from trimtab.plan.plan import Plan as Plan
from trimtab.plan.predict import predict_run as predict_run
from trimtab.plan.given import GivenRun as GivenRun

# Stages and their time
from trimtab.partition.stages import (
    split_stages as split_stages,
    SplitProblem as SplitProblem,
)
from trimtab.specs import (
    Stage as Stage,
    RecomputeChoice as RecomputeChoice,
)
from trimtab.partition.simulate import (
    stage_times as stage_times,
    simulate as simulate,
)
from trimtab.partition.timeline import Timeline as Timeline

# Training in your own loop
from trimtab.runtime.data.dataset import (
    PlanDataset as PlanDataset,
    PlanBatchSampler as PlanBatchSampler,
    PlanDataLoader as PlanDataLoader,
    collate_packs as collate_packs,
)
from trimtab.runtime.data.tables import hold_tables as hold_tables
from trimtab.runtime.data.conversations import open_conversations as open_conversations
from trimtab.runtime.data.records import open_records as open_records
from trimtab.runtime.data.collate import PackedCollator as PackedCollator
from trimtab.models.families.family import PackFormat as PackFormat
from trimtab.runtime.data.formats import ask_format as ask_format
from trimtab.runtime.data.packing import verify_packing as verify_packing
from trimtab.runtime.data.state_layers import hold_samples_apart as hold_samples_apart
from trimtab.runtime.data.loss import (
    packed_loss as packed_loss,
    step_denominator as step_denominator,
)
from trimtab.runtime.training.balanced import balanced as balanced
from trimtab.runtime.recompute.apply import apply as apply_recompute

# Pipelines
from trimtab.runtime.pipeline import (
    build_pipeline as build_pipeline,
    PipelineLayout as PipelineLayout,
    layers_of as layers_of,
    verify_pipeline as verify_pipeline,
)

# Images shared among ranks
from trimtab.runtime.vision import (
    vision_dp as vision_dp,
    vision_dp_from_plan as vision_dp_from_plan,
    vision_heartbeat as vision_heartbeat,
    encode_pooled as encode_pooled,
    verify_vision_dp as verify_vision_dp,
)
from trimtab.runtime.vision.callback import VisionDataParallelCallback as VisionDataParallelCallback
from trimtab.balance.images import (
    share_images as share_images,
    tower_seconds as tower_seconds,
    tower_bytes as tower_bytes,
)

# The work of a batch, for verl and ROLL
from trimtab.adapters.verl import (
    vlm_workload as vlm_workload,
    count_grids as count_grids,
    stand_in_for as stand_in_for,
)

# Inference
from trimtab.placement.machine import parse_machine as parse_machine
from trimtab.placement.machine import Workload as Workload
from trimtab.placement.place import place as place
from trimtab.placement.placed import Placement as Placement
from trimtab.plan.file.placement import load_placement as load_placement
from trimtab.runtime.placing.load import (
    load_placed as load_placed,
    move_inputs as move_inputs,
)
from trimtab.runtime.placing.published import split_model as split_model

# Errors
from trimtab.errors import (
    TrimtabError as TrimtabError,
    ConfigError as ConfigError,
    ImageError as ImageError,
    PackingError as PackingError,
    PartitionError as PartitionError,
    PlanError as PlanError,
    SampleError as SampleError,
    UnknownModelError as UnknownModelError,
    UnsupportedPlanError as UnsupportedPlanError,
)

__version__: str
