"""What runs a plan in torch: data, pipelines, recompute, layers measured on a device."""

# Data of a plan
from trimtab.runtime.data.dataset import PlanDataset as PlanDataset
from trimtab.runtime.data.dataset import PlanBatchSampler as PlanBatchSampler
from trimtab.runtime.data.dataset import PlanDataLoader as PlanDataLoader
from trimtab.runtime.data.tables import hold_tables as hold_tables
from trimtab.plan.file.records import open_records as open_records
from trimtab.runtime.data.collate import PackedCollator as PackedCollator

# Packs and their loss
from trimtab.runtime.data.formats import ask_format as ask_format
from trimtab.runtime.data.collate import attend_by_sample as attend_by_sample
from trimtab.runtime.data.collate import packed_loss as packed_loss
from trimtab.runtime.data.collate import step_denominator as step_denominator

# Pipelines and recompute
from trimtab.runtime.pipeline.build import build_pipeline as build_pipeline
from trimtab.plan.layout import PipelineLayout as PipelineLayout
from trimtab.runtime.pipeline.build import layers_of as layers_of
from trimtab.runtime.recompute import apply as apply_recompute

# Layers measured
from trimtab.costs.measured.traced import profile_traced as profile_traced
from trimtab.costs.measured.timed import profile_timed as profile_timed
from trimtab.costs.measured.timed import TimingOptions as TimingOptions
from trimtab.costs.measured.timed import open_device as open_device
