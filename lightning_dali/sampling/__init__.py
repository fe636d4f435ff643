"""Who gets which sample: plans that cut an epoch into batches, for every rank and from any point of it.

Runs in the rank process. Plans are values: rank and world size are arguments, all ranks can be built in one process,
and the same arguments give the same batches. A *position* is the number of global samples consumed in an epoch: it
means the same for another number of ranks, of workers or another batch size, so a run may resume with those changed.

What each rank gets, in places of the epoch's order, with 2 ranks (`*`: repeated, and flagged in `BatchTask.repeated`):

========================================  =======  =======  =======
plan                                      step     rank 0   rank 1
========================================  =======  =======  =======
TrainPlan(10, 2), drop_last (8 9 unused)  0        0 1      2 3
..                                        1        4 5      6 7
TrainPlan(10, 2, drop_last=False)         2        8        9
TrainPlan(9, 2, drop_last=False)          2        8        8*
EvalPlan(10, 4)                           0        0 1 2    3 4 5
..                                        1        6 7      8 9
EvalPlan(3, 1)                            1        2        2*
BatchSamplerPlan, batches a b c           0        a        b
.. drop_last=False                        1        c        c*
========================================  =======  =======  =======

A dataset that is iterated has a `StreamPlan`, which knows whose turn it is and not which samples come: see `streams.py`.
"""

from lightning_dali.sampling.buckets import DurationPlan
from lightning_dali.sampling.cut import Shard
from lightning_dali.sampling.plans import BatchPlan, BatchTask, EvalPlan, Plan, TrainPlan
from lightning_dali.sampling.streams import Rest, StreamPlan, StreamTask, Trail, stream_plan
from lightning_dali.sampling.user import BatchSamplerPlan, SamplerPlan, user_plan

__all__ = [
    "BatchPlan",
    "BatchSamplerPlan",
    "BatchTask",
    "DurationPlan",
    "EvalPlan",
    "Plan",
    "Rest",
    "SamplerPlan",
    "Shard",
    "StreamPlan",
    "StreamTask",
    "Trail",
    "TrainPlan",
    "stream_plan",
    "user_plan",
]
