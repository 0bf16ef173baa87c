"""Released checkpoints: reading them, cutting them into rank shards, loading shards into models."""

from .index import Checkpoint
from .loading import ShardConfig, load_shard, rank_file_name, read_shard_config
from .names import TensorEntry, count_stages, released_tensors
from .sharding import ConversionPlan, convert_checkpoint, plan_conversion
from .tensor_file import CheckpointError, DamagedWeightsError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ConversionPlan",
    "DamagedWeightsError",
    "ShardConfig",
    "TensorEntry",
    "convert_checkpoint",
    "count_stages",
    "load_shard",
    "plan_conversion",
    "rank_file_name",
    "read_shard_config",
    "released_tensors",
]
