"""The evaluation of a checkpoint, outside of training. Called by `__main__` for `ringflash eval`."""

import json

from .. import data, loop
from ..config import Config, ConfigError
from ..resume import choose_to_evaluate, holds_all, load_weights
from ..world import World
from .evaluator import Evaluator
from .picture import draw


def evaluate(config: Config, world: World) -> None:
    """Evaluate the weights that checkpoint.resume names; leave evaluation.json and a picture in the run's folder.

    All ranks must call it. Raises: ValueError, as `loop.prepare`, and without anything to evaluate or a checkpoint.
    """
    if not (config.evaluation.sources or config.evaluation.needle.lengths):
        raise ConfigError("there is nothing to evaluate: [[evaluation.sources]] or evaluation.needle.lengths is needed")
    data.check_apart(config.data, config.evaluation)
    evaluator = Evaluator(config, world, data.tokenizer_of(config.data, config.model.config["vocab_size"]))
    chosen = choose_to_evaluate(config, world)
    engine = loop.build_engine(config, world, filled=not holds_all(chosen, config))
    result = evaluator(engine, load_weights(chosen, world, engine))
    if world.rank == 0:
        file, picture = config.run_dir / "evaluation.json", config.run_dir / "evaluation.png"
        facts = {"world_size": world.size, "config": config.model_dump(mode="json")}
        draw(result, picture, name=config.train.name)
        file.write_text(json.dumps(result.as_json() | facts, indent=1) + "\n", encoding="utf-8")
        print(f"step {result.step:,}, {result.tokens_seen:,} tokens seen, evaluated in {result.time_s:.1f} s")
        print(*result.table(), f"numbers        {file}", f"picture        {picture}", sep="\n", flush=True)
