"""What a policy tells of itself, whatever it may raise: the version of its weights, and how busy it is."""

import math
import operator
import warnings

from toolgym.agents.policy import EngineLoad, LoadReporting, Policy, PolicyFailure
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


def load_of(policy: Policy) -> EngineLoad | None:
    """How busy a policy's engine is; None where it does not tell.

    One that raises here tells nothing, with a warning: an engine in trouble says so where it is asked to sample.
    """
    if not isinstance(policy, LoadReporting):
        return None
    try:
        load = policy.load()
    except Exception as error:  # noqa: BLE001 - see above
        warnings.warn(f"the policy told no load, so none is looked at: {described(error)}", RuntimeWarning, 2)
        return None
    if isinstance(load, EngineLoad) and all(_is_number(part) for part in (load.running, load.waiting, load.kv_usage)):
        return load
    warnings.warn(f"the policy told no load, so none is looked at: {load!r:.200}", RuntimeWarning, 2)
    return None


def _is_number(part: object) -> bool:
    return part is None or (isinstance(part, int | float) and math.isfinite(part))
