"""The trainer: from one TOML file to a trained model. Nothing is imported here, so that `launch` can read `train.config` without torch."""
