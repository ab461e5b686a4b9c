"""`DumpFolder`: trajectories as text, in the layout in which AReaL dumps its rollouts.

``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``, a line with nine fields:

================  ====================================================================================================
``task_id``       the task, as it is; the file's name is made safe, see `toolgym.rollout.files.safe_name`
``sample_idx``    the member of the group
``seqlen``        tokens in all
``prompt_len``    of them, tokens of the first prompt
``head_version``  weight version of the first token that was sampled; -1 if none was
``tail_version``  weight version of the last one; -1 if none was
``reward``        null where there is none: it failed, or was cancelled
``prompt``        text of the first prompt
``completion``    text of everything after it: what was sampled, and the observations between
================  ====================================================================================================
"""

import json
from pathlib import Path
from typing import Any

from toolgym.agents.chat import ChatFormat
from toolgym.envs.errors import ConfigurationError
from toolgym.rollout.files import drop_cut_off_line, make_folder, safe_name
from toolgym.rollout.trajectory import Sample, Trajectory


class DumpFolder:
    """Adds trajectories to the dump of one trial. One process writes to a trial at a time.

    Args:
        fileroot: the root of all dumps.
        experiment: name of a folder in it.
        trial: name of a folder in that.
        chat: the chat format that the tokens are decoded by.

    Raises:
        ConfigurationError: a name that is not one of a folder, no chat format, or a folder that cannot be made.
    """

    def __init__(self, fileroot: str | Path, experiment: str, trial: str, chat: ChatFormat) -> None:
        for what, name in (("experiment", experiment), ("trial", trial)):
            if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
                raise ConfigurationError(f"expected {what} as the name of one folder, actual {name!r:.100}")
        if not isinstance(chat, ChatFormat):
            raise ConfigurationError(f"expected chat as a ChatFormat, actual {chat!r:.100}")
        self._chat = chat
        self.path = make_folder(make_folder(fileroot, "dumps") / experiment / trial, "dumps")

    def write(self, trajectory: Trajectory) -> Path:
        """Add a trajectory to the file of its task. When this returns, killing the process does not lose it.

        It goes to the folder of its scope, training or evaluation, and there to that of the version that sampled its
        last token; where none was sampled, to ``-1``. One that was split has a line for each sample, one after
        another, with the same ``sample_idx``, each with its sample's own prompt and versions. Tasks of one id share a
        file. What a kill cut off earlier is removed first.

        Returns:
            The file.

        Raises:
            OSError: the file cannot be written.
        """
        folder = self.path / trajectory.scope / str(trajectory.version_span[1])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{safe_name(trajectory.task_id)}.jsonl"
        whole = Sample(trajectory.input_ids, trajectory.loss_mask, trajectory.logprobs, trajectory.versions)
        samples = trajectory.samples if trajectory.breaks else (whole,)  # one without a token has no samples
        entries = [self._entry(trajectory, sample) for sample in samples]
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        path.touch()
        with path.open("r+b") as file:
            drop_cut_off_line(file)
            file.write(lines.encode())
        return path

    def _entry(self, trajectory: Trajectory, sample: Sample) -> dict[str, Any]:
        prompt_len = int(sample.loss_mask.argmax()) if sample.loss_mask.any() else len(sample)
        head, tail = sample.version_span
        return {
            "task_id": trajectory.task_id,
            "sample_idx": trajectory.member,
            "seqlen": len(sample),
            "prompt_len": prompt_len,
            "head_version": head,
            "tail_version": tail,
            "reward": trajectory.reward,
            "prompt": self._chat.decode(sample.input_ids[:prompt_len].tolist()),
            "completion": self._chat.decode(sample.input_ids[prompt_len:].tolist()),
        }
