"""The one Hydra entry point: composes configs/, makes the objects, fits.

pip install -e '.[hydra]'
python examples/train.py                                        # images
python examples/train.py experiment=speech trainer=cpu          # other groups
python examples/train.py -m data.batch_size=4,8,16              # one run after another
python examples/train.py experiment=video debug=one_batch --cfg job --resolve     # show it, run nothing
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[1]
# So that configs name what is here as `examples.tasks`; the variable is for workers that are not forked, and other ranks.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="config")
def main(config: DictConfig) -> float:
    """Runs one config; returns the last loss, for sweepers."""
    L.seed_everything(config.seed, workers=True)
    datamodule = instantiate(config.data)
    model = instantiate(config.model)
    trainer = instantiate(config.trainer)
    # Every rank writes what it runs: they must not differ.
    OmegaConf.save(
        config, Path(HydraConfig.get().runtime.output_dir) / f"rank-{trainer.global_rank}.yaml", resolve=True
    )
    try:
        trainer.fit(model, datamodule)
    finally:
        datamodule.close()
    return float(trainer.callback_metrics.get("loss", float("nan")))


if __name__ == "__main__":
    main()
