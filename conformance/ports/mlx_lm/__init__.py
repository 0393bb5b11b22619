"""mlx-lm's implementation of the model (`mlx_lm.models.deepseek_v41`) behind the suite's interface."""
