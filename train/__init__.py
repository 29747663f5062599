"""The trainer: from one TOML file to a trained model. Imports nothing: `launch` reads `train.config` without torch."""
