"""Every public name, once: `__init__.py` reads this file when a name is first used, type checkers and editors too."""

from trimtab.errors import (
    ConfigError as ConfigError,
    ImageError as ImageError,
    PackingError as PackingError,
    PartitionError as PartitionError,
    PlanError as PlanError,
    SampleError as SampleError,
    TrimtabError as TrimtabError,
    UnknownModelError as UnknownModelError,
    UnsupportedPlanError as UnsupportedPlanError,
)
from trimtab.options import ReadingOptions as ReadingOptions
from trimtab.models.describe import (
    describe as describe,
    read_config as read_config,
)
from trimtab.models.description import save_description as save_description
from trimtab.models.image_rules import image_rule as image_rule
from trimtab.samples.size import size_samples as size_samples
from trimtab.balance.columns import (
    open_packed as open_packed,
    pack_columns as pack_columns,
)
from trimtab.balance.cost import LinearCost as LinearCost
from trimtab.balance.dispatch import redispatch as redispatch
from trimtab.balance.images import share_images as share_images
from trimtab.balance.mixture import mix_samples as mix_samples
from trimtab.balance.packing import (
    pack_samples as pack_samples,
    report_packing as report_packing,
)
from trimtab.balance.streaming import StreamPacker as StreamPacker
from trimtab.costs.devices import (
    find_device as find_device,
    parse_cluster as parse_cluster,
)
from trimtab.placement.workload import Workload as Workload
from trimtab.costs.profile import (
    load_profile as load_profile,
    profile_model as profile_model,
    save_profile as save_profile,
)
from trimtab.placement.machine import parse_machine as parse_machine
from trimtab.placement.place import place as place
from trimtab.placement.placed import Placement as Placement
from trimtab.partition.simulate import simulate as simulate
from trimtab.partition.stages import (
    split_stages as split_stages,
    SplitProblem as SplitProblem,
)
from trimtab.plan.build import (
    make_plan as make_plan,
    write_plan as write_plan,
)
from trimtab.plan.given import GivenRun as GivenRun
from trimtab.plan.predict import predict_run as predict_run
from trimtab.plan.measured.check import check_plan as check_plan
from trimtab.plan.file.details import PlanDetails as PlanDetails
from trimtab.plan.file.yaml import load_plan as load_plan
from trimtab.plan.options import PlanOptions as PlanOptions
from trimtab.plan.file.placement import load_placement as load_placement
from trimtab.plan.plan import Plan as Plan
from trimtab.plan.sharing.choice import VisionChoice as VisionChoice
from trimtab.runtime.data.collate import PackedCollator as PackedCollator
from trimtab.runtime.data.conversations import open_conversations as open_conversations
from trimtab.runtime.data.dataset import (
    PlanBatchSampler as PlanBatchSampler,
    PlanDataLoader as PlanDataLoader,
    PlanDataset as PlanDataset,
)
from trimtab.runtime.training.packed_trainer import PackedTrainer as PackedTrainer
from trimtab.runtime.data.packing import verify_packing as verify_packing
from trimtab.runtime.pipeline import (
    build_pipeline as build_pipeline,
    PipelineLayout as PipelineLayout,
    verify_pipeline as verify_pipeline,
)
from trimtab.runtime.placing.published import split_model as split_model
from trimtab.runtime.placing.load import (
    load_placed as load_placed,
    move_inputs as move_inputs,
)
from trimtab.runtime.recompute.apply import apply as apply_recompute
from trimtab.runtime.data.records import open_records as open_records
from trimtab.runtime.training.trainer import PlanTrainerMixin as PlanTrainerMixin
from trimtab.runtime.vision import (
    verify_vision_dp as verify_vision_dp,
    vision_dp as vision_dp,
)
from trimtab.partition.timeline import Timeline as Timeline
from trimtab.specs import (
    ClusterSpec as ClusterSpec,
    DeviceSpec as DeviceSpec,
    ModelSpec as ModelSpec,
    Packing as Packing,
    ParallelDims as ParallelDims,
    Profile as Profile,
    RecomputeChoice as RecomputeChoice,
    SampleTable as SampleTable,
    Schedule as Schedule,
    Stage as Stage,
)
from trimtab.runtime.data.loss import (
    packed_loss as packed_loss,
    step_denominator as step_denominator,
)
from trimtab.models.families.family import PackFormat as PackFormat
from trimtab.models.asking.model import describe_model as describe_model

__version__: str
