"""Fine-tuning: adapters or all weights, samples of a text file, steps that can be interrupted.

>>> from cupyattn.models import training
>>> training.Schedule("cosine", 1e-4, steps=100, warmup=9).at(1)
1e-05
"""

from cupyattn.models.training.batches import Batch, Packing, Sample, packed
from cupyattn.models.training.data import Data, Reader, split
from cupyattn.models.training.full_weights import FullWeights
from cupyattn.models.training.lora import LoraAdapters
from cupyattn.models.training.optimizer import AdamWOptions, LossScale, Schedule
from cupyattn.models.training.trainable import Trainable, loss_of
from cupyattn.models.training.trainer import TrainedStep, Trainer

__all__ = [
    "AdamWOptions",
    "Batch",
    "Data",
    "FullWeights",
    "LoraAdapters",
    "LossScale",
    "Packing",
    "Reader",
    "Sample",
    "Schedule",
    "Trainable",
    "TrainedStep",
    "Trainer",
    "loss_of",
    "packed",
    "split",
]
