"""The one error type of the build."""


class BuildError(SystemExit):
    """A reason why the build can't go on: one sentence, shown without a traceback."""

    def __init__(self, sentence: str):
        super().__init__(f"flash_attn3: {sentence}")
        self.sentence = sentence
