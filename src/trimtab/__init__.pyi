"""Every public name, once: `__init__.py` reads this file when a name is first used, type checkers and editors too.

The comments are the headings of the reference in the documentation (docs/conf.py).
"""

# Models
from trimtab.models.describe import describe as describe
from trimtab.specs import ModelSpec as ModelSpec

# Data
from trimtab.samples.size import size_samples as size_samples
from trimtab.samples.table import (
    SizingResult as SizingResult,
    save_sizing as save_sizing,
    load_sizing as load_sizing,
)
from trimtab.options import ReadingOptions as ReadingOptions
from trimtab.specs import SampleTable as SampleTable

# Packing
from trimtab.balance.packing import (
    pack_samples as pack_samples,
    report_packing as report_packing,
)
from trimtab.balance.cost import LinearCost as LinearCost
from trimtab.balance.step import pack_steps as pack_steps
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
from trimtab.specs import (
    Profile as Profile,
    ParallelDims as ParallelDims,
)

# Plans
from trimtab.plan.build import make_plan as make_plan
from trimtab.plan.options import PlanOptions as PlanOptions
from trimtab.lora import Lora as Lora
from trimtab.plan.file.figures import PlanDetails as PlanDetails
from trimtab.plan.build import write_plan as write_plan
from trimtab.plan.file.yaml import load_plan as load_plan
from trimtab.plan.file.check import check_plan as check_plan
from trimtab.plan.plan import Plan as Plan
from trimtab.plan.predict import predict_run as predict_run
from trimtab.plan.options import GivenRun as GivenRun

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
from trimtab.partition.simulate import Timeline as Timeline

# Training in your own loop
from trimtab.runtime.training.balanced import balanced as balanced
from trimtab.runtime.training.shared import OnlineBalancer as OnlineBalancer
from trimtab.runtime.data.conversations import open_conversations as open_conversations

# Inference
from trimtab.placement.place import place as place

# Errors
from trimtab.errors import TrimtabError as TrimtabError

__version__: str
