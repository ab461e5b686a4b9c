"""What a policy tells of itself, whatever it may raise: the version of its weights, and how busy it is."""

import operator

from toolgym.agents.policy import EngineLoad, Policy, PolicyFailure
from toolgym.envs.waiting import described


def version_of(policy: Policy) -> int | None:
    """The version of a policy's weights now; None where it has no versions.

    Raises:
        PolicyFailure: (kind ``"version_raised"``) it raised when it was asked, or told something that is no int.
    """
    try:
        version = getattr(policy, "version", None)
        return None if version is None else operator.index(version)
    except Exception as error:  # a policy may raise anything
        raise PolicyFailure(f"the policy told no version: {described(error)}", kind="version_raised") from error


def load_of(policy: Policy) -> EngineLoad:
    """How busy a policy's engine is, as far as it tells.

    One that raises here tells nothing: an engine in trouble says so where it is asked to sample.
    """
    try:
        load = policy.load()  # type: ignore[attr-defined]  # most have none
    except Exception:  # noqa: BLE001 - see above
        load = None
    return load if isinstance(load, EngineLoad) else EngineLoad(None, None, None)
