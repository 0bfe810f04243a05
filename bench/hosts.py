"""What drifted in the frameworks that plans are exported to: `python bench/hosts.py [--hosts FOLDER] [--download]`.

Every name that an export prints is looked up in the host's own source, and so is what an adapter says of the host: how
many arguments a script takes, which fields and defaults there are, which families have a provider. Sources are read as
syntax trees, so that releases for other Pythons are read too; nothing of a host is imported or run. FOLDER (default:
hosts) holds `NAME-VERSION.whl` from the registry (`--download` fetches the newest) and git directories or clones, named
`pai`, `roll` and `mindspeed-mm`, of those that are not there.

Exit code 1 where something drifted; a host without source is named and passed over.
"""

import argparse
import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "src")]

from export_cases import by_counts, cut, decide, make_model  # noqa: E402
from trimtab.adapters import megatron_hosts, mindspeed_mm, pai_megatron  # noqa: E402
from trimtab.adapters.frameworks import find_target  # noqa: E402
from trimtab.specs import ParallelDims, RecomputeChoice  # noqa: E402

REGISTRY = ("megatron-core", "megatron-bridge", "ms-swift", "verl", "megatron-energon", "llamafactory", "axolotl")
CLONES = ("pai", "roll", "mindspeed-mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one host by their paths, and which release they are of."""

    version: str
    read: Callable[[str], str | None]
    paths: tuple[str, ...]

    def tree(self, path: str) -> ast.Module:
        text = self.read(path)
        return ast.parse("" if text is None else text)

    def fields(self, *paths: str, of: str | None = None) -> dict[str, ast.expr | None]:
        """Annotated fields of the files' classes, or of the class `of`, with their defaults."""
        return {
            item.target.id: item.value
            for path in paths
            for node in ast.walk(self.tree(path))
            if isinstance(node, ast.ClassDef) and of in (None, node.name)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }


def from_wheel(path: Path) -> Source:
    archive = zipfile.ZipFile(path)
    names = tuple(archive.namelist())
    return Source(
        version="-".join(path.name.split("-")[:2]),
        read=lambda name: archive.read(name).decode() if name in names else None,
        paths=names,
    )


def from_git(folder: Path) -> Source:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    return Source(
        version=f"{folder.name} at {git('rev-parse', '--short', 'HEAD').strip()}",
        read=lambda name: git("show", f"HEAD:{name}") or None,
        paths=tuple(git("ls-tree", "-r", "--name-only", "HEAD").splitlines()),
    )


def find_sources(folder: Path) -> dict[str, Source]:
    """By host the newest wheel in the folder, or the clone of its name."""
    found = {path.name: from_git(path) for path in sorted(folder.glob("*")) if path.name in CLONES}
    for name in REGISTRY:
        wheels = folder.glob(f"{name.replace('-', '_')}-*.whl")
        newest = max(
            wheels, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name.split("-")[1])], default=None
        )
        if newest is not None:
            found[name] = from_wheel(newest)
    return found


# -- what is printed ---------------------------------------------------------------------------------------------------


def exported(name: str, family: str = "qwen2_5_vl") -> Mapping[str, object]:
    """The fields of an export that recomputes, shards and splits."""
    model = make_model(family=family, experts=8)
    block = model.indices("language", "block")[0]
    chosen = {0: [RecomputeChoice(tier="full", layers=(*model.indices("vision", "block"), block))]}
    stages = by_counts(model, 6, 6, recompute=chosen)
    dims = ParallelDims(dp=2, pp=2, tp=2, cp=1 if name == "pai-megatron" else 2, ep=2, etp=1)
    return find_target(name).export(decide(model, stages, dims=dims, max_tokens=4096, dispatcher="deepep")).fields


def missing(given: set[str], known: set[str], where: str) -> Iterator[str]:
    for name in sorted(given - known):
        yield f"{where} has no {name}"


# -- one function a host -----------------------------------------------------------------------------------------------


def check_core(source: Source) -> Iterator[str]:
    known = set(
        source.fields("megatron/core/transformer/transformer_config.py", "megatron/core/model_parallel_config.py")
    )
    words = exported("megatron")["vision_config"]
    assert isinstance(words, Mapping)
    yield from missing(set(words), known, "TransformerConfig")
    text = source.read("megatron/training/arguments.py") or ""
    flags = {str(word)[2:].replace("-", "_") for word in exported("megatron")["flags"] if str(word).startswith("--")}  # type: ignore[attr-defined]
    training = [path for path in source.paths if path.startswith("megatron/training/config/")]
    core = (
        known
        | set(source.fields(*training))
        | set(source.fields("megatron/core/distributed/distributed_data_parallel_config.py"))
    )
    said = {flag for flag in flags if f"--{flag.replace('_', '-')}" in text}
    yield from missing(flags - said, core, "Megatron-LM's parser")
    core |= set(source.fields("megatron/core/optimizer/optimizer_config.py"))
    parts = tuple(f"cfg.{part}." for part in ("train", "ddp", "optimizer"))
    given = {name.rpartition(".")[2] for name in exported("megatron-bridge") if name.startswith(parts)}
    yield from missing(given, core, "cfg.train, cfg.ddp and cfg.optimizer, which Megatron-Bridge has from here,")
    layout = source.read("megatron/core/transformer/pipeline_parallel_layer_layout.py")
    if layout is None or "NotImplementedError" not in layout:
        yield "a layout's letters for other layers raise no NotImplementedError now: see whether the tower can be cut"


def check_bridge(source: Source) -> Iterator[str]:
    model = "megatron/bridge/models/"
    sources = {
        name
        for path in source.paths
        if path.startswith(model) and path.endswith("_bridge.py")
        for name in re.findall(r'(?:source=|_HF_CLASS_NAME = )"?(\w+)', source.read(path) or "")
    }
    yield from missing(set(megatron_hosts.PROVIDERS.values()), sources, "Megatron-Bridge's registry")
    copying = {
        path
        for path in source.paths
        if path.endswith("transformer_config.py")
        and "config.recompute_granularity = megatron_config" in (source.read(path) or "")
    }
    for family in megatron_hosts.COPIES_RECOMPUTE:
        stem = {"qwen3_5": "qwen3_vl", "qwen3_5_moe": "qwen3_vl", "qwen3_vl_moe": "qwen3_vl"}.get(family, family)
        stem = {"exaone4_5": "exaone45", "ernie4_5_vl_moe": "ernie45_vl"}.get(stem, stem)
        if not any(stem in path for path in copying):
            yield f"the tower of {family} no longer copies the language model's recompute"
    fields = exported("megatron-bridge")
    container = source.fields("megatron/bridge/training/config.py", of="ConfigContainer")
    yield from missing({name.split(".")[1] for name in fields}, set(container), "ConfigContainer")
    precision = fields["cfg.mixed_precision"]
    if f"def {precision}(" not in (source.read("megatron/bridge/training/mixed_precision.py") or ""):
        yield f"training/mixed_precision.py has no {precision}"
    freezes = {name.removeprefix("cfg.model.") for name in fields if name.startswith("cfg.model.freeze_")}
    providers = [path for path in source.paths if path.startswith(model) and path.endswith("_provider.py")]
    yield from missing(freezes, set(source.fields(*providers)), "the providers of vision-language models")


def check_swift(source: Source) -> Iterator[str]:
    arguments = [
        path for path in source.paths if re.match(r"swift/(megatron/)?arguments/.*\.py|swift/template/.*args.*", path)
    ]
    known = source.fields(*arguments)
    yield from missing(set(exported("ms-swift")), set(known), "megatron sft")
    for name, default in {
        "freeze_vit": "True",
        "freeze_aligner": "True",
        "freeze_llm": "False",
        "recompute_granularity": "'selective'",
    }.items():
        value = known.get(name)
        if value is None or ast.unparse(value) != default:
            yield f"{name} is {default} by default no longer, but {'gone' if value is None else ast.unparse(value)}"
    packing = source.read("swift/dataset/packing.py") or ""
    for name in ("class PackingDataset", "self.packed_idx", "self.packed_length", "self.packing_length"):
        if name not in packing:
            yield f"swift/dataset/packing.py has no {name}, which the plug-in of swift-packs sets"


def check_pai(source: Source) -> Iterator[str]:
    for family, (folder, names) in pai_megatron.SCRIPTS.items():
        script = source.read(f"examples/{folder}/run_mcore_qwen.sh")
        if script is None:
            yield f"examples/{folder}/run_mcore_qwen.sh is gone ({family})"
            continue
        found = {int(number): name for name, number in re.findall(r"^(\w+)=\$\{?(\d+)\}?", script, re.MULTILINE)}
        order = tuple(found[number] for number in sorted(found))
        if order != names:
            yield f"examples/{folder}/run_mcore_qwen.sh takes {len(order)} arguments: {', '.join(order)}"
        for variable in ("MP_PP0_LAYERS", "MP_AC_LAYERS"):
            if variable not in script:
                yield f"examples/{folder}/run_mcore_qwen.sh reads no {variable}"


def check_verl(source: Source) -> Iterator[str]:
    tree = source.tree("verl/utils/seqlen_balancing.py")
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "calculate_workload"]
    if [[a.arg for a in node.args.args] for node in defined] != [["seqlen_list"]]:
        yield "verl.utils.seqlen_balancing.calculate_workload(seqlen_list) is no longer what it was"


def check_energon(source: Source) -> Iterator[str]:
    loader = source.read("megatron/energon/task_encoder/loader.py") or ""
    for name in ("shuffle_buffer_size", "max_samples_per_sequence", "shuffle_over_epochs_multiplier"):
        if f"{name}:" not in loader:
            yield f"get_train_dataset takes no {name}"
    if "split_samples_to_workers" not in (source.read("megatron/energon/flavors/webdataset/sharder.py") or ""):
        yield "Sharder.split_samples_to_workers is gone: ranks may read other runs of the samples"


def check_roll(source: Source) -> Iterator[str]:
    text = source.read("roll/utils/sequence_packing.py") or ""
    for name in ("def calculate_workload(", "def calculate_workload_batch("):
        if name not in text:
            yield f"roll/utils/sequence_packing.py has no {name}"


def check_mindspeed(source: Source) -> Iterator[str]:
    model = source.read("mindspeed_mm/models/vlm_model.py") or ""
    for name in ("config.vision_encoder.pipeline_num_layers[self.pp_rank]", "config.pipeline_num_layers[self.pp_rank]"):
        if name not in model:
            yield f"vlm_model.py reads no {name}"
    blocks = source.read("mindspeed_mm/models/vision/vision_encoders/vision_transformer_block.py") or ""
    if "self.config.recompute_method == 'block'" not in blocks:
        yield "the tower has no recompute by blocks of its own configuration"
    if "'freeze', True)" not in (source.read("pretrain_vlm.py") or ""):
        yield "the tower is frozen by default no longer"
    converters = {path.rpartition("/")[2] for path in source.paths if path.startswith("checkpoint/vlm_model/")}
    files = {f"{family.replace('_vl', 'vl')}.py" for family in mindspeed_mm.FAMILIES}
    yield from missing(files, converters, "its converter of weights")


def check_fields(name: str, *paths: str) -> Callable[[Source], Iterator[str]]:
    """Whether every setting of a recipe is a field of some class of these files."""

    def check(source: Source) -> Iterator[str]:
        files = [path for path in source.paths if path.startswith(paths) and path.endswith(".py")]
        yield from missing(set(exported_whole(name)) - {"deepspeed"}, set(source.fields(*files)), name)

    return check


def exported_whole(name: str) -> Mapping[str, object]:
    """The settings of a recipe for whole models that recomputes and shards."""
    model = make_model()
    chosen = {0: [RecomputeChoice(tier="full", layers=tuple(model.indices("language", "block")))]}
    plan = decide(model, cut(model, recompute=chosen), zero_stage=3)
    return find_target(name).export(plan).fields


def check_llama_factory(source: Source) -> Iterator[str]:
    own = source.fields(*(path for path in source.paths if path.startswith("llamafactory/hparams/")))
    inherited = {"do_train", "per_device_train_batch_size", "gradient_accumulation_steps", "deepspeed"}
    inherited |= {"bf16", "fp16", "optim"}  # of Transformers' TrainingArguments, as those above
    yield from missing(set(exported_whole("llama-factory")) - inherited, set(own), "llamafactory.hparams")
    for name in ("freeze_vision_tower", "freeze_multi_modal_projector"):
        if "default=True" not in ast.unparse(own.get(name) or ast.Constant(value=None)):
            yield f"{name} is on by default no longer"
    workflow = source.read("llamafactory/train/sft/workflow.py") or ""
    for name in ("= get_dataset(template, model_args", "trainer = CustomSeq2SeqTrainer("):
        if name not in workflow:
            yield f"train/sft/workflow.py has no {name}, which our run replaces"


def check_axolotl(source: Source) -> Iterator[str]:
    yield from check_fields("axolotl", "axolotl/utils/schemas/", "axolotl/integrations/liger/args.py")(source)
    text = source.read("axolotl/integrations/base.py") or ""
    for name in ("load_datasets", "post_model_load", "post_trainer_create"):
        if f"def {name}(" not in text:
            yield f"BasePlugin has no {name}"


CHECKS: Mapping[str, Callable[[Source], Iterator[str]]] = {
    "megatron-core": check_core,
    "megatron-bridge": check_bridge,
    "ms-swift": check_swift,
    "pai": check_pai,
    "verl": check_verl,
    "megatron-energon": check_energon,
    "roll": check_roll,
    "mindspeed-mm": check_mindspeed,
    "llamafactory": check_llama_factory,
    "axolotl": check_axolotl,
}


def download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in REGISTRY:
        words = ["download", "--quiet", "--no-deps", "--ignore-requires-python", "--dest", str(folder), name]
        older = ["--python-version", "3.12", "--only-binary=:all:"]
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words, *older], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name}: not fetched ({done.stderr.strip().splitlines()[-1]})", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=Path, default=Path("hosts"))
    parser.add_argument("--download", action="store_true")
    given = parser.parse_args()
    if given.download:
        download(given.hosts)
    sources, drifted = find_sources(given.hosts), 0
    for name, check in CHECKS.items():
        if name not in sources:
            print(f"{name}: no source in {given.hosts}")
            continue
        found = list(check(sources[name]))
        drifted += len(found)
        print(f"{sources[name].version}: {'as exported' if not found else f'{len(found)} drifted'}")
        for sentence in found:
            print(f"  {sentence}")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
