"""`conformance trace`: where a whole model that runs freely first leaves the golden trace, and what made it.

`free_running` and `dump` say what a target computed, `compare` how far that is from the recording, `own_inputs` what
each component made of the inputs that it was really given, `teacher_forced` what it makes of the recorded ones, and
`finding` puts these into a sentence.
"""
