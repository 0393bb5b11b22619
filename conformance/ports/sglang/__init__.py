"""SGLang's parts of the model that run without a GPU behind the suite's interface."""
