"""Folders of questions: `conformance export` writes them, a port answers them anywhere, `check dir:DIR` judges.

A folder is a conversation with a process (`conformance.protocol`) that was written down: the commands of each case,
with their tensors, and room for the replies.  `layout` names the files and reads the manifest, `questions` tells
whether two versions of the suite ask the same, `export` writes.  `conformance.adapters.folder` reads the answers.
"""
